"""One call of a function as one graph, and the code around it (2.11-2.15).

Dynamo turns a function into a graph and into bytecode around it (`shell`). Here they are taken apart: what was
compiled can be exchanged, the bytecode can be stored, and what would be guards are facts that may be checked
at any time.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.torch_version import TorchVersion

from torchloom.errors import ServeError
from torchloom.pieces.places import GuardOn
from torchloom.pieces.shell import Shell, plain_function
from torchloom.pieces.symbols import SizeGuard, forget_constant_floats, guards_of


@dataclass
class FullGraph:
    """A captured call."""

    graph_module: torch.fx.GraphModule
    inputs: list[Any]
    """The examples, one for each placeholder; symbolic sizes stand for themselves."""
    env: Any
    """torch's ShapeEnv."""
    shell: Shell
    codes: tuple[types.CodeType, ...]
    """The functions that were traced."""
    guards: tuple[GuardOn, ...]
    """What the trace relied on besides sizes."""
    modules: Mapping[str, str]
    """Modules that these refer to among the globals, by the names that the trace gave them."""

    def size_guards(self) -> list[SizeGuard]:
        """Return what was assumed of sizes so far; compiling the graph may add to it."""
        return guards_of(self.env)


def capture_full(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    unbacked: bool = False,
    ints: Sequence[str] = (),
    floats: Sequence[str] = (),
) -> FullGraph:
    """Trace a call as one graph; nothing is executed.

    Args:
        function: a function or bound method.
        args: its arguments; sizes that `mark_varying` marked are symbols.
        kwargs: its keyword arguments.
        unbacked: whether marked sizes were marked with `unbacked=True`.
        ints: expressions such as "L['n']" for whole numbers that are symbols.
        floats: likewise for floats; the graph takes each as a tensor of one number.

    Raises:
        ServeError: the call has no graph.
        torch._dynamo.exc.Unsupported: the call cannot be one graph; the text says why and where.
    """
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.utils import get_metrics_context
    from torch.fx.experimental import _config

    # Their patch() is made at run time.
    shape_config: Any = _config
    compiler_config: Any = torch.compiler.config
    plain, _ = plain_function(function)
    before = set(plain.__globals__)
    with (
        get_metrics_context(),
        _varying_floats(plain, floats),
        compiler_config.patch(dynamic_sources=",".join(f"{re.escape(source)}$" for source in ints)),
        shape_config.patch(backed_size_oblivious=not unbacked),
        dynamo_config.patch(
            automatic_dynamic_shapes=bool(floats),  # else what is known of floats is not looked at
            specialize_float=not floats,
            assume_static_by_default=True,
            record_runtime_overhead=False,  # two calls less in each call
        ),
    ):
        found = fullgraph_capture(function, tuple(args), dict(kwargs))
    output, backend = found.graph_capture_output, found.backend_input
    if backend is None:
        raise ServeError("the call computes nothing on tensors: there is nothing to compile")
    runtime_env = output.get_runtime_env()
    imports = runtime_env.import_sources
    made = {
        name: output.f_globals[name]
        for name in runtime_env.external_refs
        if name in output.f_globals
        and name not in before
        and name not in imports
        and not name.startswith("__compiled_fn")  # the graph, whose place is taken
    }
    guards = {
        (each.source, each.kind, repr(each.name), each.other or ""): each
        for each in map(_guard_on, output.output_graph.guards)
        if each.source
    }
    roots = set(
        re.findall(r"G\['(\w+)'\]", " ".join(f"{g.source} {g.other}" for g in guards.values()))
    )
    named = {
        name: output.f_globals[name].__name__
        for name in roots - before
        if isinstance(output.f_globals.get(name), types.ModuleType)
    }
    for name in set(plain.__globals__) - before:
        del plain.__globals__[name]  # what Dynamo left in the user's module
    codes = tuple(output.traced_code)
    return FullGraph(
        backend.graph_module,
        list(backend.example_inputs),
        backend.fake_mode.shape_env,
        Shell(
            runtime_env.bytecode,
            backend.backend_id,
            {alias: name for alias, name in imports.items() if alias in runtime_env.external_refs},
            # The function's own are looked up where the bytecode runs, which may be another process.
            {
                name: value
                for name, value in getattr(runtime_env, "used_globals", {}).items()
                if name not in plain.__globals__
            },
            made,
        ),
        codes,
        tuple(guards[key] for key in sorted(guards)),
        {**named, **imports},
    )


@contextmanager
def _varying_floats(function: types.FunctionType, floats: Sequence[str]) -> Iterator[None]:
    """Let Dynamo believe that it has seen other values of some floats: there is no mark to put on a float."""
    if not floats:
        yield
        return
    from torch._dynamo import pgo

    forget_constant_floats()
    make: Any = pgo.CodeId.make
    parts = (function.__code__, function.__closure__)  # up to 2.12 the code alone
    known = make(*parts[: len(inspect.signature(make).parameters)])
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


def mark_varying(
    tensor: torch.Tensor, dim: int, *, unbacked: tuple[int, int] | None = None
) -> None:
    """Let a size of an example be a symbol when it is captured.

    Args:
        tensor: the example.
        dim: which of its sizes.
        unbacked: the least and the greatest value of a symbol that nothing may branch on; None for one
            that stands for the example's own size.
    """
    from torch._dynamo.decorators import mark_unbacked, maybe_mark_dynamic

    if unbacked is None:
        maybe_mark_dynamic(tensor, dim)
    else:
        takes = inspect.signature(
            mark_unbacked
        ).parameters  # up to 2.12 no bounds: less can be proven
        bounds: Any = {"min": unbacked[0], "max": unbacked[1]} if "min" in takes else {}
        mark_unbacked(tensor, dim, hint_override=tensor.size(dim), **bounds)


def is_unsupported(error: BaseException) -> bool:
    """Return whether an error says that a call cannot be one graph."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def guards_class_methods() -> bool:
    """Return whether Dynamo puts guards on what class methods read of their class, as since torch 2.12."""
    return TorchVersion(torch.__version__) >= "2.12"
