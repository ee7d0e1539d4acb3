"""One call of a function as one graph, and the code around it (2.11-2.13).

Dynamo turns a function into a graph and into bytecode that fetches the graph's inputs, calls what was
compiled of it, and rebuilds the function's result. Here the three are taken apart: what was compiled can be
exchanged, the bytecode can be stored, and what would be guards are facts that may be checked at any time.
"""

from __future__ import annotations

import dataclasses
import io
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchloom._torch.symbols import SizeGuard, guards_of


@dataclass
class FullGraph:
    """A captured call."""

    graph_module: torch.fx.GraphModule
    inputs: list[Any]
    """Fake tensors and symbolic sizes, one for each placeholder."""
    env: Any
    """torch's ShapeEnv."""
    shell: Shell
    codes: tuple[types.CodeType, ...]
    """The functions that were traced."""
    sources: tuple[str, ...]
    """Expressions over `L` (arguments) and `G` (globals) whose values the trace relied on."""

    def size_guards(self) -> list[SizeGuard]:
        """Return what was assumed of sizes so far; compiling the graph may add to it."""
        return guards_of(self.env)


@dataclass
class Shell:
    """The bytecode around a graph."""

    env: Any
    """torch's GraphRuntimeEnv."""
    backend_id: str
    made_globals: dict[str, Any] = field(default_factory=dict)
    """Globals that Dynamo made for the bytecode."""

    def around(
        self, compiled: Callable[..., Any], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that runs the bytecode with a compiled graph in it.

        Args:
            compiled: takes the graph's inputs, returns its outputs.
            function: what was captured, or the same one in another process: globals, closure and
                defaults are its own.
        """
        plain = plain_function(function)[0]
        env = dataclasses.replace(
            self.env,
            closure=plain.__closure__,
            argdefs=plain.__defaults__,
            **({"kwdefaults": plain.__kwdefaults__} if hasattr(self.env, "kwdefaults") else {}),
        )
        made = env.forward_callable(
            self.backend_id,
            compiled,
            extra_globals={**plain.__globals__, **self.made_globals},
        )
        made.__kwdefaults__ = plain.__kwdefaults__
        return made

    def to_bytes(self) -> bytes:
        """Return the bytecode for another process.

        Raises:
            TypeError: it refers to an object that lives in this process alone.
        """
        from torch._dynamo.aot_compile import AOTCompilePickler
        from torch._dynamo.package import SerializedCode

        # What the function itself brings is taken from it again where the bytecode is loaded.
        env = dataclasses.replace(
            self.env,
            bytecode=SerializedCode.from_code_object(self.env.bytecode),
            closure=None,
            argdefs=None,
            **({"kwdefaults": None} if hasattr(self.env, "kwdefaults") else {}),
        )
        buffer = io.BytesIO()
        pickler = AOTCompilePickler({}, buffer)
        try:
            pickler.dump((env, self.backend_id, self.made_globals))
        except Exception as error:
            raise TypeError(f"the code around the graph cannot be stored: {error}") from error
        if pickler.errors:
            kinds = sorted({type(each).__name__ for each in pickler.errors.values()})
            raise TypeError(f"the code around the graph refers to modules: {', '.join(kinds)}")
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Shell:
        """Return what `to_bytes` stored."""
        from torch._dynamo.aot_compile import AOTCompileUnpickler
        from torch._dynamo.package import SerializedCode

        env, backend_id, made = AOTCompileUnpickler({}, io.BytesIO(content)).load()
        env = dataclasses.replace(env, bytecode=SerializedCode.to_code_object(env.bytecode))
        return cls(env, backend_id, made)


def capture_full(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    unbacked: bool = False,
) -> FullGraph:
    """Trace a call as one graph; nothing is executed.

    Args:
        function: a function or bound method.
        args: its arguments; sizes that `mark_varying` marked are symbols.
        kwargs: its keyword arguments.
        unbacked: whether marked sizes were marked with `unbacked=True`.

    Raises:
        torch._dynamo.exc.Unsupported: the call cannot be one graph; the text says why and where.
    """
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.utils import get_metrics_context
    from torch.fx.experimental import _config

    shape_config: Any = _config  # its patch() is made at run time
    plain, _ = plain_function(function)
    before = set(plain.__globals__)
    with (
        get_metrics_context(),
        shape_config.patch(backed_size_oblivious=not unbacked),
        dynamo_config.patch(
            automatic_dynamic_shapes=False,
            assume_static_by_default=True,
            record_runtime_overhead=False,  # two calls less in each call
        ),
    ):
        found = fullgraph_capture(function, tuple(args), dict(kwargs))
    output, backend = found.graph_capture_output, found.backend_input
    if backend is None:
        raise ValueError("the call computes nothing on tensors: there is nothing to compile")
    runtime_env = output.get_runtime_env()
    made = {
        name: output.f_globals[name]
        for name in runtime_env.external_refs
        if name in output.f_globals
        and name not in before
        and name not in runtime_env.import_sources
        and not name.startswith("__compiled_fn")  # the graph, whose place is taken
    }
    for name in set(plain.__globals__) - before:
        del plain.__globals__[name]  # what Dynamo left in the user's module
    sources = sorted({guard.name for guard in output.output_graph.guards if guard.name})
    codes = tuple(output.traced_code)
    return FullGraph(
        backend.graph_module,
        list(backend.example_inputs),
        backend.fake_mode.shape_env,
        Shell(runtime_env, backend.backend_id, made),
        codes,
        tuple(sources),
    )


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
        mark_unbacked(tensor, dim, min=unbacked[0], max=unbacked[1], hint_override=tensor.size(dim))


def plain_function(function: Callable[..., Any]) -> tuple[types.FunctionType, object | None]:
    """Return the Python function behind a callable, and the object that it is bound to."""
    from torch._dynamo.convert_frame import get_traced_fn

    return get_traced_fn(function)


def value_of(source: str, scope: Mapping[str, Any]) -> Any:
    """Return what an expression of `FullGraph.sources` stands for.

    Raises:
        Exception: it does not exist (any more).
    """
    from torch._dynamo.guards import _get_closure_vars

    return eval(source, {**_get_closure_vars(), **scope})


def is_unsupported(error: BaseException) -> bool:
    """Return whether an error says that a call cannot be one graph."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)
