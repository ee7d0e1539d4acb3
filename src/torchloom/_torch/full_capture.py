"""Dynamo's capture of a call as one graph: the graph, the bytecode around it, and its guards as data."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchloom._torch.shapes import (
    forget_constant_floats,
    no_special_sizes,
    symbol_ranges,
    unknown_values,
)


@dataclasses.dataclass(frozen=True)
class GuardOn:
    """One of Dynamo's guards."""

    kind: str
    """The name of what builds it, such as "TYPE_MATCH"."""
    source: str
    """An expression over `L` (arguments) and `G` (globals)."""
    name: Any = None
    """The attribute or key that it asks for."""
    other: str | None = None
    """Another expression that stands for the same object."""


@dataclasses.dataclass(frozen=True)
class Captured:
    """A call as Dynamo captured it."""

    graph_module: torch.fx.GraphModule
    inputs: list[Any]
    """The examples, one for each placeholder."""
    env: Any
    """torch's ShapeEnv."""
    bytecode: types.CodeType
    """Runs the graph with what it takes from the arguments."""
    backend_id: str
    """The name under which the bytecode calls the graph."""
    imports: Mapping[str, str]
    """Modules among the globals of the bytecode, by its names for them."""
    references: frozenset[str]
    """Globals that the bytecode refers to."""
    used_globals: Mapping[str, Any]
    """Globals that it uses, where torch tells."""
    scope: Mapping[str, Any]
    """Globals during the trace."""
    traced: tuple[types.CodeType, ...]
    """The functions that were traced."""
    guards: tuple[GuardOn, ...]
    """What the trace relied on besides sizes."""


def capture_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    plain: types.FunctionType,
    unbacked: bool,
    ints: Sequence[str],
    floats: Sequence[str],
    ranges: Mapping[int, tuple[int, int]],
) -> Captured | None:
    """Trace a call as one graph; return None where it computes nothing on tensors.

    Args:
        function: a function or bound method.
        args: its arguments.
        kwargs: its keyword arguments.
        plain: the Python function behind `function`.
        unbacked: whether marked sizes were marked with bounds that nothing may branch on.
        ints: expressions such as "L['n']" for whole numbers that are symbols.
        floats: likewise for floats; the graph takes each as a tensor of one number.
        ranges: the least and the greatest value of a symbol, by what it is in this call.

    Raises:
        torch._dynamo.exc.Unsupported: the call cannot be one graph; see `is_unsupported`.
    """
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.utils import get_metrics_context

    compiler_config: Any = torch.compiler.config  # its patch() is made at run time
    with (
        get_metrics_context(),
        _varying_floats(plain, floats),
        compiler_config.patch(dynamic_sources=",".join(f"{re.escape(source)}$" for source in ints)),
        no_special_sizes(enabled=not unbacked),
        symbol_ranges(ranges),
        unknown_values(),
        dynamo_config.patch(
            automatic_dynamic_shapes=bool(floats),  # else what is known of floats is not looked at
            specialize_float=not floats,
            assume_static_by_default=True,
            record_runtime_overhead=False,  # two calls less in each call
        ),
    ):
        found = fullgraph_capture(function, tuple(args), dict(kwargs))
    return _in_our_words(found)


def _in_our_words(found: Any) -> Captured | None:
    output, backend = found.graph_capture_output, found.backend_input
    if backend is None:
        return None
    runtime_env = output.get_runtime_env()
    return Captured(
        backend.graph_module,
        list(backend.example_inputs),
        backend.fake_mode.shape_env,
        runtime_env.bytecode,
        backend.backend_id,
        runtime_env.import_sources,
        frozenset(runtime_env.external_refs),
        getattr(runtime_env, "used_globals", {}),
        output.f_globals,
        tuple(output.traced_code),
        tuple(map(_guard_on, output.output_graph.guards)),
    )


def is_unsupported(error: BaseException) -> bool:
    """Return whether an error says that a call cannot be one graph."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


@contextmanager
def _varying_floats(function: types.FunctionType, floats: Sequence[str]) -> Iterator[None]:
    """Let Dynamo believe that it has seen other values of some floats: there is no mark to put on a float."""
    if not floats:
        yield
        return
    from torch._dynamo import pgo

    forget_constant_floats()
    make: Any = pgo.CodeId.make
    closure = (function.__closure__,) if keeps_floats_by_closure() else ()
    known = make(function.__code__, *closure)
    states = pgo.get_code_state()
    before = states.pop(known, None)
    for source in floats:
        states[known].automatic_dynamic[source] = pgo.FrameStateSizeEntry(scalar=pgo.auto_dynamic)
    try:
        yield
    finally:
        states.pop(known, None)
        if before is not None:
            states[known] = before


@functools.cache
def keeps_floats_by_closure() -> bool:
    """Return whether Dynamo keeps what it knows of a function's floats by its closure as well as its code."""
    from torch._dynamo import pgo

    return len(inspect.signature(pgo.CodeId.make).parameters) > 1


def _guard_on(guard: Any) -> GuardOn:
    build, given = guard.create_fn, {}
    while isinstance(build, functools.partial):
        given = {**build.keywords, **given}
        build = build.func
    other = given.get("source_b", given.get("source"))
    source, name = guard.name, given.get("attr", given.get("key"))
    if build.__name__ == "HASATTR" and name is None:  # up to 2.12 its source is the attribute
        attribute = guard.originating_source
        if not hasattr(attribute, "member"):  # of a module, or the code of a function
            attribute = attribute.base if hasattr(attribute.base, "member") else attribute
        source, name = _source_text(attribute.base), getattr(attribute, "member", "__code__")
    return GuardOn(build.__name__, source, name, None if other is None else _source_text(other))


def _source_text(source: Any) -> str:
    return source.name if isinstance(source.name, str) else source.name()
