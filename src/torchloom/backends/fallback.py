"""A backend that tries others in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchloom import events
from torchloom.backends.forwarding import Forwarding
from torchloom.backends.graphs import copy_graph_module, name_of
from torchloom.backends.records import CompilerFn
from torchloom.backends.registry import lookup_backend
from torchloom.errors import BackendError
from torchloom.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class _Fallback(Forwarding):
    backends: tuple[str | CompilerFn, ...]
    on: tuple[type[Exception], ...]

    @property
    def compiler_name(self) -> str:
        return f"fallback({', '.join(map(name_of, self.backends))})"

    def inner(self) -> tuple[str | CompilerFn, ...]:
        return self.backends

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        failed: list[tuple[str, str]] = []
        last_error: Exception | None = None
        untouched = copy_graph_module(gm)
        for backend in self.backends:
            # Options are written for the first backend; the others may not know them.
            given = {} if failed else options
            graph = copy_graph_module(untouched) if failed else gm
            try:
                compiled = lookup_backend(backend)(graph, example_inputs, **given)
            except self.on as error:
                failed.append((name_of(backend), f"{type(error).__name__}: {_first_line(error)}"))
                last_error = error
                continue
            self._say(backend, failed)
            return compiled
        causes = "; ".join(f"{name}: {why}" for name, why in failed)
        raise BackendError(
            f"every backend of {self.compiler_name} failed. {causes}"
        ) from last_error

    def _say(self, chosen: str | CompilerFn, failed: list[tuple[str, str]]) -> None:
        name = name_of(chosen)
        events.emit(events.BackendChosen(backend=name, failed=tuple(failed)))
        for each, why in failed:
            logger.warning("a graph is compiled with %s, because %s failed: %s", name, each, why)


def fallback(
    first: str | CompilerFn,
    *then: str | CompilerFn,
    on: tuple[type[Exception], ...] = (Exception,),
) -> CompilerFn:
    """Return a backend that compiles each graph with the first backend that can.

    A backend fails by raising while it compiles. One that compiles the backward graph later, in
    the first backward pass (Inductor does), can only fail there: too late for another one.
    Which backend won is logged for each graph for which the first one failed.

    Args:
        first: a registered name or a callable; it alone gets the options of torch.compile.
        then: what to try next, in order, e.g. "eager".
        on: the exceptions that count as failing.

    Raises:
        BackendError: fewer than two backends are given; or, while compiling, all of them failed.

    Example:
        >>> torch.compile(fn, backend=fallback("inductor", "eager"))  # doctest: +SKIP
    """
    if not then:
        raise BackendError("fallback() needs a second backend: pass e.g. fallback('mine', 'eager')")
    for backend in (first, *then):
        if not isinstance(backend, str):  # a name may belong to a package that is not installed
            lookup_backend(backend)
    return _Fallback((first, *then), on)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
