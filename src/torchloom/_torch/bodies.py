"""AOTAutograd over a part of a captured graph, while torch traces the graph that calls it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchloom._torch.aot import boxed
from torchloom.errors import RegionError

ENTER_AUTOCAST: Any = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST: Any = torch.amp.autocast_mode._exit_autocast
SET_GRAD: Any = torch._C._set_grad_enabled
LOG_USAGE: Any = torch._C._log_api_usage_once
"""Statements of graphs that Dynamo captured: they have no value, and what follows obeys them."""
CHECKPOINT: Any = torch.ops.higher_order.tag_activation_checkpoint
"""What Dynamo makes of `torch.utils.checkpoint`: (graph, *its inputs, **options of checkpoint)."""
CHECKPOINT_POLICY = "_checkpoint_context_fn"
"""Where the graph's module has the `context_fn` of a checkpoint, in `meta`."""


@dataclass(frozen=True)
class TracedPart:
    """The functional graph of a part: with its backward, or alone."""

    graph_module: fx.GraphModule
    """Joint where `trains`: values and gradients of the part's inputs."""
    num_results: int
    has_tangent: tuple[bool, ...]
    """For each result, whether the joint graph takes its gradient."""
    problem: str | None
    """Why it is no plain function of its inputs; None: it is one."""
    settings: dict[str, Any]
    """What a partitioner is told."""


@dataclass(frozen=True)
class AmbientAutocast:
    """What autocast does around a compile, to be the same while a part is traced."""

    states: tuple[tuple[str, bool, torch.dtype], ...]
    caches: bool

    @classmethod
    def now(cls, devices: Sequence[str]) -> AmbientAutocast:
        """Return what is in force for some types of devices."""
        states = tuple(
            (each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
            for each in sorted({"cpu", *devices})
            if torch.amp.is_autocast_available(each)
        )
        return cls(states, torch.is_autocast_cache_enabled())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let it be in force in the block."""
        with ExitStack() as stack:
            for device, enabled, dtype in self.states:
                stack.enter_context(
                    torch.autocast(device, dtype, enabled=enabled, cache_enabled=self.caches)
                )
            yield


def trace_part(
    part: fx.GraphModule, inputs: Sequence[Any], *, trains: bool, for_inductor: bool
) -> TracedPart:
    """Trace a part of a captured graph by itself.

    Args:
        part: its nodes, as Dynamo captured them.
        inputs: fake tensors, of one fake mode, and sizes.
        trains: whether its backward is wanted; some inputs then need gradients.
        for_inductor: use Inductor's decompositions and its rewrites of joint graphs.

    Raises:
        Exception: whatever AOTAutograd raises for the part.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch.utils._python_dispatch import _disable_current_modes

    graphs: list[tuple[fx.GraphModule, int, dict[str, Any]]] = []
    metas: list[Any] = []

    def rewritten(graph_module: fx.GraphModule) -> fx.GraphModule:
        return _joint_passes(graph_module, inputs) if for_inductor else graph_module

    def partition(joint: fx.GraphModule, joint_inputs: Any, **settings: Any) -> Any:
        joint = rewritten(joint)
        num_results = settings.pop("num_fwd_outputs")
        graphs.append((joint, num_results, settings))
        graph = fx.Graph()
        graph.output(graph.graph_copy(joint.graph, {}))
        graph.output_node().meta.update(joint.graph.output_node().meta)
        # Only what AOTAutograd notes about it counts; these halves never run.
        return default_partition(
            fx.GraphModule(joint, graph), joint_inputs, num_fwd_outputs=num_results
        )

    def compiler(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        context = TracingContext.try_get()
        metas.append(None if context is None else context.fw_metadata)
        return boxed(graph_module.forward)

    def infer(graph_module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graph_module = rewritten(graph_module)
        (results,) = graph_module.graph.output_node().args
        graphs.append((graph_module, len(results), {}))  # type: ignore[arg-type]
        return compiler(graph_module, example_inputs)

    more = {"decompositions": _inductor_decompositions()} if for_inductor else {}
    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partition,
        inference_compiler=infer,
        **more,
    )
    mode = detect_fake_mode(inputs)
    with (
        _disable_current_modes(),
        _fresh_node_meta(),
        _untold(),
        torch.set_grad_enabled(trains),
        tracing(TracingContext(mode)),  # type: ignore[arg-type]
    ):
        backend(part, list(inputs))
    (graph_module, num_results, settings), meta = graphs[0], metas[0]
    infos = [] if meta is None else meta.output_info
    has_tangent = tuple(trains and bool(each.requires_grad) for each in infos)
    return TracedPart(graph_module, num_results, has_tangent, _problem(meta), settings)


@contextmanager
def _fresh_node_meta() -> Iterator[None]:
    """Let nodes that are traced in the block take nothing from the node that is being traced around it."""
    from torch.fx import traceback

    before = traceback.current_meta
    traceback.current_meta = {}
    try:
        yield
    finally:
        traceback.current_meta = before


@contextmanager
def _untold() -> Iterator[None]:
    """Keep graphs of a part out of torch's structured trace, whose readers take them for those of the whole."""
    trace = logging.getLogger("torch.__trace")
    before, trace.disabled = trace.disabled, True
    try:
        yield
    finally:
        trace.disabled = before


def _joint_passes(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    device = next(each.device for each in inputs if isinstance(each, torch.Tensor))
    with config.patch(joint_custom_pre_pass=None):  # our own, which is for whole graphs
        return _recursive_joint_graph_passes(graph_module, input_device=device)


def _inductor_decompositions() -> Any:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def post_grad_passes(graph_module: fx.GraphModule, *, is_inference: bool) -> None:
    """Rewrite a part's graph as Inductor rewrites each graph before it generates code."""
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_post_grad_passes

    with config.patch(post_grad_custom_post_pass=None):  # our own, which is for whole graphs
        _recursive_post_grad_passes(graph_module, is_inference)


def _problem(meta: Any) -> str | None:
    """Return what AOTAutograd's wrapper would do around the graph, None if nothing."""
    from torch._functorch._aot_autograd.schemas import OutputType

    if meta is None:
        return "torch does not tell what it found out about it"
    written = [each.mutates_data or each.mutates_metadata for each in meta.input_info]
    # A lone view of a value that is no result itself is returned by `_unsafe_view`, without more.
    fine = (OutputType.non_alias, OutputType.unsafe_view_alias)
    shared = [each.output_type not in fine for each in meta.output_info]
    problems = {
        "it writes to what it reads": any(written),
        "its results share memory": any(shared) or bool(meta.num_intermediate_bases),
        "it has effects that are ordered by tokens": bool(meta.tokens),
        "it changes the gradient mode": meta.grad_enabled_mutation is not None,
        "it draws random numbers by torch's functional way": meta.is_rng_op_functionalized,
    }
    return next((text for text, holds in problems.items() if holds), None)


PHASE: ContextVar[Callable[[str], None]] = ContextVar("phase", default=lambda name: None)
"""Told "layer" when Inductor begins to lower a body, and "rest" behind that."""


@dataclass(frozen=True)
class Segment:
    """A function of Inductor's generated code whose text is given: it calls operators and bodies."""

    name: str
    inputs: Sequence[Any]
    """Fake tensors and sizes, in the order of what it is called with."""
    outputs: Sequence[torch.Tensor]
    """Fake tensors; none shares memory with another or with an input."""
    bodies: Mapping[str, fx.GraphModule]
    """What the text calls, by the names that it calls them by: functions of one list, which they empty."""
    lines: Sequence[str]
    """Statements of a function of `args`, a list that it empties; they return a list."""


def lower_segment(segment: Segment) -> Callable[..., list[Any]]:
    """Return a target for a node, which Inductor calls with what it made of the node's arguments."""

    def lower(*args: Any) -> list[Any]:
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        parent: Any = V.graph
        bodies = parent.__dict__.setdefault("_torchloom_bodies", {})
        for name, graph_module in segment.bodies.items():
            if name not in bodies:
                bodies[name] = _lowered_body(parent, name, graph_module)
        # Where Inductor reads the strides that inputs must have, behind two arguments of its own.
        parent.current_node.meta["eager_input_vals"] = ((None, None, *segment.inputs), {})
        code: Any = _SegmentCode(segment, parent, [bodies[name] for name in segment.bodies])
        made = ir.Subgraph(name=segment.name, graph_module=parent.module, graph=code)
        return [ir.TensorBox.create(each) for each in ir.InvokeSubgraph.create(made, *args)]

    lower.__name__ = segment.name
    lower._inductor_lowering_function = True  # type: ignore[attr-defined]  how Inductor knows a lowering
    return lower


class _SegmentCode:
    """What Inductor's wrapper asks of the graph of a function that it calls."""

    def __init__(self, segment: Segment, parent: Any, bodies: Sequence[Any]) -> None:
        from torch._inductor import ir

        self.name = parent.qualify_name(segment.name)
        self._lines, self._parent, self._bodies = segment.lines, parent, bodies
        layouts = map(ir.FallbackKernel.tensor_to_layout, segment.outputs)
        self.graph_outputs = [ir.Buffer(name=None, layout=layout) for layout in layouts]

    def codegen(self) -> tuple[Any, None]:
        """Write the function, behind those that it calls."""
        from torch._inductor.utils import IndentedBuffer, ValueWithLineMap
        from torch._inductor.virtualized import V

        with V.set_graph_handler(self._parent):
            for body in self._bodies:
                self._parent.wrapper_code.codegen_subgraph_common(body)
        text = IndentedBuffer()
        text.writeline(f"def {self.name}(args):")
        with text.indent():
            text.writelines(self._lines)
        return ValueWithLineMap(text.getvalue(), []), None


def _lowered_body(parent: Any, name: str, graph_module: fx.GraphModule) -> Any:
    """Let Inductor lower a body's graph.

    Raises:
        RegionError: it lays a result out in another way than the graph, by which whoever reads it goes.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    PHASE.get()("layer")
    values = [each.meta["val"] for each in graph_module.graph.find_nodes(op="placeholder")]
    output = graph_module.graph.output_node()
    results: Any = output.args[0]
    layouts = [ir.FallbackKernel.tensor_to_layout(each.meta["val"]) for each in results]
    # Without these two, Inductor may pad results or choose another order of their dims.
    output.meta["user_visible_output_idxs"] = range(len(results))
    output.meta["original_output_strides"] = [each.meta["val"].stride() for each in results]
    with _nothing_donated():  # read when the object is made
        graph = parent.make_subgraph(gm=graph_module, example_inputs=values, subgraph_name=name)
    with V.set_graph_handler(graph):
        graph.run(*values)
    PHASE.get()("rest")
    for node, made, wanted in zip(results, graph.graph_outputs, layouts, strict=True):
        if not ir.significant_strides_equal(made.get_stride(), wanted.stride, wanted.size):
            raise RegionError(f"Inductor lays result {node} of a body out otherwise than its graph")
    return ir.Subgraph(name=name, graph_module=graph_module, graph=graph)


@contextmanager
def _nothing_donated() -> Iterator[None]:
    """Let Inductor write to no input of a graph that it lowers in the block.

    It reads which inputs of a backward graph it may write to by their place (`GraphLowering.bw_donated_idxs`), and
    reads the same places for a body, whose inputs are others: a body then returned a gradient in the memory of one that
    the graph around it used again (torch 2.13, no upstream issue known).
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    meta: Any = None if context is None else context.fw_metadata
    if meta is None:
        yield
        return
    before, meta.bw_donated_idxs = meta.bw_donated_idxs, None
    try:
        yield
    finally:
        meta.bw_donated_idxs = before
