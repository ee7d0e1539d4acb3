"""A backend that passes each graph to a function before another backend compiles it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchloom.backends.forwarding import Forwarding
from torchloom.backends.graphs import copy_graph_module, name_of
from torchloom.backends.records import CompilerFn
from torchloom.backends.registry import lookup_backend
from torchloom.errors import BackendError

Sink = Callable[[fx.GraphModule, Sequence[Any]], object]


@dataclass(frozen=True)
class _Tee(Forwarding):
    backend: str | CompilerFn
    sink: Sink

    @property
    def compiler_name(self) -> str:
        return f"tee({name_of(self.backend)})"

    def inner(self) -> tuple[str | CompilerFn, ...]:
        return (self.backend,)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        self.sink(copy_graph_module(gm), example_inputs)
        return lookup_backend(self.backend)(gm, example_inputs, **options)


def tee(backend: str | CompilerFn, sink: Sink) -> CompilerFn:
    """Return a backend that calls `sink(gm, example_inputs)` and then compiles with `backend`.

    Args:
        backend: a registered name or a callable.
        sink: gets a copy of the captured graph, its own to keep, before the compiler rewrites the
            original. What it raises ends the compile.

    Raises:
        BackendError: `backend` is unknown, or `sink` is not callable.

    Example:
        >>> graphs = []
        >>> keep = tee("inductor", lambda gm, inputs: graphs.append(gm))
        >>> torch.compile(fn, backend=keep)  # doctest: +SKIP
    """
    if not callable(sink):
        raise BackendError(
            f"the sink of tee() is a {type(sink).__name__}: pass a function of (gm, example_inputs)"
        )
    lookup_backend(backend)
    return _Tee(backend, sink)
