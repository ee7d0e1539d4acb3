"""Inductor's options as users give them: values, and passes as functions or as "module:function"."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torchloom.errors import ServeError

TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
"""What level 3 adds for exact sizes."""


def resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for Inductor.

    Args:
        options: names of Inductor's config and values; a pass may be a function, or "module:function".

    Raises:
        ServeError: a pass cannot be imported.
    """
    return {
        name: _pass(name, value) if "_pass" in name else value for name, value in options.items()
    }


def spelled(patches: Mapping[str, Any]) -> dict[str, str]:
    """Return options as texts that are equal in each process."""
    return {
        name: str(value.uuid()) if hasattr(value, "uuid") else repr(value)
        for name, value in sorted(patches.items())
    }


def _pass(name: str, value: Any) -> Any:
    if isinstance(value, str) and ":" in value:
        module, _, attribute = value.partition(":")
        try:
            value = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ServeError(f"{name}={module}:{attribute} cannot be imported: {error}") from error
    if callable(value) and not hasattr(value, "uuid"):
        from torchloom.serve.builder.pieces.named_pass import NamedPass  # which needs Inductor

        return NamedPass(value)
    return value
