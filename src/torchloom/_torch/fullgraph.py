"""One call of a function as one graph, and the code around it (2.11-2.13).

Dynamo turns a function into a graph and into bytecode around it (`shell`). Here they are taken apart: what was
compiled can be exchanged, the bytecode can be stored, and what would be guards are facts that may be checked
at any time.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchloom._torch.shell import Shell, plain_function
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
    imports = runtime_env.import_sources
    made = {
        name: output.f_globals[name]
        for name in runtime_env.external_refs
        if name in output.f_globals
        and name not in before
        and name not in imports
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
        tuple(sources),
        dict(imports),
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


def is_unsupported(error: BaseException) -> bool:
    """Return whether an error says that a call cannot be one graph."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)
