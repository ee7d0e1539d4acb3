"""torchloom's own backends. They need rooms above this one, so they are imported when looked up."""

from __future__ import annotations

from importlib import import_module

from torchloom.backends.records import CompilerFn

OURS = {"torchloom": "torchloom.pipeline.backend:weave"}
"""Name -> "module:function". The package declares the same entry points to torch."""


def load_own(name: str) -> CompilerFn:
    """Import a backend of torchloom."""
    module, _, attr = OURS[name].partition(":")
    return getattr(import_module(module), attr)
