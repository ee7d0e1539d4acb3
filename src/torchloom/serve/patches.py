"""Inductor's options as users write them: values, and passes of their own as functions or names of them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import fx

from torchloom._torch import CustomGraphPass
from torchloom.errors import ServeError

TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
"""What level 3 adds for exact sizes."""


class NamedPass(CustomGraphPass):
    """A user's pass with a name that caches know it by: that of the function, and its source."""

    def __init__(self, fn: Callable[[fx.Graph], None]) -> None:
        self._fn = fn

    def __call__(self, graph: fx.Graph) -> None:
        """Edit a graph."""
        self._fn(graph)

    def uuid(self) -> str:
        """Return what changes when the function does."""
        try:
            source = inspect.getsource(self._fn)
        except (OSError, TypeError):
            source = repr(getattr(self._fn, "__code__", None) and self._fn.__code__.co_code)
        name = f"{self._fn.__module__}.{getattr(self._fn, '__qualname__', type(self._fn).__qualname__)}"
        return f"{name} {hashlib.sha256(source.encode()).hexdigest()[:16]}"


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
        return NamedPass(value)
    return value
