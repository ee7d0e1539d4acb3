"""The common base of backends that are built from other backends."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any

from torchloom._torch.inductor import inductor_config
from torchloom.backends.attributes import attribute_of
from torchloom.backends.records import CompilerFn
from torchloom.backends.registry import lookup_backend
from torchloom.errors import BackendError


class Forwarding(ABC):
    """Forwards `reset` and `get_compiler_config` to the inner backends.

    Combinators are frozen dataclasses: two made of equal parts are equal, so that Dynamo, which
    recompiles when the backend changes, sees one backend.
    """

    @abstractmethod
    def inner(self) -> tuple[str | CompilerFn, ...]:
        """Return the backends that this one is built from."""

    def reset(self) -> None:
        """Reset every inner backend; `torch._dynamo.reset` calls this."""
        for _, fn in self._found():
            reset = attribute_of(fn, "reset")
            if reset is not None:
                reset()

    def get_compiler_config(self) -> dict[str, Any]:
        """Return the settings of the first inner backend that has any."""
        for backend, fn in self._found():
            if backend == "inductor":
                return inductor_config()
            config = attribute_of(fn, "get_compiler_config")
            if config is not None:
                return config()
        return {}

    def _found(self) -> list[tuple[str | CompilerFn, CompilerFn]]:
        """Return the inner backends that can be found: a fallback may name one that is not installed."""
        found = []
        for backend in self.inner():
            with contextlib.suppress(BackendError):
                found.append((backend, lookup_backend(backend)))
        return found
