"""torchloom's own backends. They stand on rooms above this one, so they load when looked up."""

from __future__ import annotations

from importlib import import_module

from torchloom.backends.records import CompilerFn

OURS = {"torchloom": "torchloom.pipeline.backend:weave"}
"""Name -> "module:function". The package announces the same to torch as entry points."""


def load_own(name: str) -> CompilerFn:
    """Import a backend of torchloom."""
    module, _, attr = OURS[name].partition(":")
    return getattr(import_module(module), attr)
