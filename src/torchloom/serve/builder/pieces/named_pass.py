"""A user's function as a pass of Inductor."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable

from torch import fx

from torchloom._torch.custom_pass import CustomGraphPass


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
