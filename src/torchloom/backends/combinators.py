"""Backends built from other backends: `by_device` chooses one, `fallback` tries several, `tee` shows what one compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchloom import events
from torchloom._torch.aot import copy_graph_module
from torchloom._torch.inductor import inductor_config
from torchloom.backends.claims import CompilerFn
from torchloom.backends.graphs import devices_of, name_of
from torchloom.backends.registry import lookup_backend
from torchloom.errors import BackendError
from torchloom.log import get_logger

logger = get_logger(__name__)

Backend = str | CompilerFn
"""A registered name, or a function."""
Sink = Callable[[fx.GraphModule, Sequence[Any]], object]


@dataclass(frozen=True)
class Combined:
    """A backend built from others.

    Two made of equal parts are equal, so that Dynamo, which recompiles when the backend changes, sees one backend.
    """

    compiler_name: str
    inner: tuple[Backend, ...]
    rule: Callable[..., Any]
    """Compiles a graph, given this backend, graph, inputs, options and `parts`."""
    parts: tuple[Any, ...] = ()

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        return self.rule(self, gm, example_inputs, options, *self.parts)

    def reset(self) -> None:
        """Reset every inner backend; `torch._dynamo.reset` calls this."""
        for _, fn in self._found():
            getattr(fn, "reset", lambda: None)()

    def get_compiler_config(self) -> dict[str, Any]:
        """Return the settings of the first inner backend that has any."""
        for backend, fn in self._found():
            if backend == "inductor":
                return inductor_config()
            if hasattr(fn, "get_compiler_config"):
                return fn.get_compiler_config()
        return {}

    def _found(self) -> list[tuple[Backend, CompilerFn]]:
        """Return the inner backends that can be found: a fallback may name one that is not installed."""
        found = []
        for backend in self.inner:
            with contextlib.suppress(BackendError):
                found.append((backend, lookup_backend(backend)))
        return found


def _by_device(
    made: Combined,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: dict[str, Any],
    choices: tuple[tuple[str, Backend], ...],
    default: Backend | None,
) -> Any:
    # A graph with tensors on an accelerator runs there; those on the CPU are its scalars.
    devices = sorted(devices_of(gm, example_inputs) - {"cpu"}) or ["cpu"]
    if len(devices) > 1:
        raise BackendError(
            f"{made.compiler_name}: one graph has tensors on {', '.join(devices)}; "
            "move the model to one kind of device"
        )
    chosen = dict(choices).get(devices[0], default)
    if chosen is None:
        raise BackendError(
            f"{made.compiler_name}: a graph runs on {devices[0]}, for which no backend was given: "
            f"pass {devices[0]}=... or default=..."
        )
    return lookup_backend(chosen)(gm, example_inputs, **options)


def by_device(*, default: Backend | None = None, **backends: Backend) -> CompilerFn:
    """Return a backend that compiles each graph with the backend of its device.

    Args:
        default: the backend for all other devices; without it they are an error.
        backends: device type -> registered name or callable, e.g. `cpu="inductor"`.

    Raises:
        BackendError: no backend is given, or one is unknown.

    Example:
        >>> chosen = by_device(cpu="inductor", cuda="cudagraphs")
        >>> torch.compile(fn, backend=chosen)  # doctest: +SKIP
    """
    if not backends and default is None:
        raise BackendError("by_device() got no backend: pass e.g. cpu='inductor'")
    choices = tuple(sorted(backends.items()))
    inner = (*(backend for _, backend in choices), *([] if default is None else [default]))
    for backend in inner:
        lookup_backend(backend)
    name = ", ".join(f"{device}={name_of(backend)}" for device, backend in choices)
    return Combined(f"by_device({name})", inner, _by_device, (choices, default))


def _first_that_can(
    made: Combined,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: dict[str, Any],
    on: tuple[type[Exception], ...],
) -> Any:
    failed: list[tuple[str, str]] = []
    last_error: Exception | None = None
    untouched = copy_graph_module(gm)
    for backend in made.inner:
        # Options are written for the first backend; the others may not know them.
        given = {} if failed else options
        graph = copy_graph_module(untouched) if failed else gm
        try:
            compiled = lookup_backend(backend)(graph, example_inputs, **given)
        except on as error:
            why, *_ = str(error).splitlines() or [""]
            failed.append((name_of(backend), f"{type(error).__name__}: {why}"))
            last_error = error
            continue
        events.emit(events.BackendChosen(backend=name_of(backend), failed=tuple(failed)))
        for name, why in failed:
            text = "a graph is compiled with %s, because %s failed: %s"
            logger.warning(text, name_of(backend), name, why)
        return compiled
    causes = "; ".join(f"{name}: {why}" for name, why in failed)
    raise BackendError(f"every backend of {made.compiler_name} failed. {causes}") from last_error


def fallback(
    first: Backend, *then: Backend, on: tuple[type[Exception], ...] = (Exception,)
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
    inner = (first, *then)
    for backend in inner:
        if not isinstance(backend, str):  # a name may belong to a package that is not installed
            lookup_backend(backend)
    name = f"fallback({', '.join(map(name_of, inner))})"
    return Combined(name, inner, _first_that_can, (on,))


def _shown_first(
    made: Combined,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: dict[str, Any],
    sink: Sink,
) -> Any:
    sink(copy_graph_module(gm), example_inputs)
    return lookup_backend(made.inner[0])(gm, example_inputs, **options)


def tee(backend: Backend, sink: Sink) -> CompilerFn:
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
    return Combined(f"tee({name_of(backend)})", (backend,), _shown_first, (sink,))
