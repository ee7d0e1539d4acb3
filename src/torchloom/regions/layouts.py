"""Bodies whose backward takes gradients as they lie in memory.

AOTAutograd traces a backward for gradients that lie like the results themselves. Around the calls of bodies
they may lie otherwise: behind a transpose, a sum, a slice. Operators may add numbers up in another order then, so a
body that is to compute the same bits is traced for the strides that its calls have.

traced     results = handed_out(value, strides)       its derivative: laid_out(gradient, strides)
edited     results = value                            the gradient, which now lies like that
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchloom.errors import RegionError
from torchloom.graph import args_of, value_of
from torchloom.ops.library import LIBRARY, define
from torchloom.ops.regions import Body, Layout


def _fake_handed_out(value: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _fake_laid_out(grad: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device)


handed_out = define("handed_out(Tensor value, SymInt[] strides) -> Tensor", _fake_handed_out)
"""Stands for a result whose gradient has strides of its own; only while a body is traced."""
laid_out = define("laid_out(Tensor grad, SymInt[] strides) -> Tensor", _fake_laid_out)
"""Stands for that gradient."""


def _keep_strides(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.strides = inputs[1]


def _lay_out(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return laid_out(grad, ctx.strides), None


torch.library.register_autograd(
    "torchloom::handed_out", _lay_out, setup_context=_keep_strides, lib=LIBRARY
)


class OtherLayoutsError(RegionError):
    """Gradients of calls lie otherwise than their bodies were traced for.

    Args:
        layouts: how they lie, by the number of the call.
    """

    def __init__(self, layouts: Mapping[int, Layout]) -> None:
        super().__init__("gradients of its results lie in memory otherwise from call to call")
        self.layouts = dict(layouts)


def check_layouts(
    bodies: Iterable[Body], groups: Sequence[Sequence[int]], *, spreads: bool
) -> None:
    """Compare how gradients lay while calls were traced with what their bodies were traced for.

    Args:
        bodies: of a graph whose backward was traced.
        groups: numbers of calls of equal parts, in the order of forward.
        spreads: a call hands gradients on to the call before it: take what is found for the last one that differs
            for all before it as well, as most layers hand on what they take.

    Raises:
        OtherLayoutsError: some differ.
    """
    seen: dict[int, Layout] = {}
    differing: set[int] = set()
    for body in bodies:
        for call, layout in body.seen.items():
            seen[call] = layout
            if not body.copies_gradients and layout != layout_of(body):
                differing.add(call)
    if not differing:
        return
    for group in groups:
        last = max(differing.intersection(group), default=None)
        if spreads and last is not None:
            seen.update((call, seen[last]) for call in group if call < last)
    raise OtherLayoutsError(seen)


def layout_of(body: Body) -> Layout:
    """Return how a body takes the gradients of its results."""
    return tuple(None if each is None else tuple(each.stride()) for each in body.tangents)


def with_layout(captured: fx.GraphModule, layout: Layout) -> fx.GraphModule:
    """Return a part as Dynamo captured it whose gradients, when it is traced, lie as given."""
    graph = fx.Graph()
    results = graph.graph_copy(captured.graph, {})
    assert isinstance(results, tuple), results
    graph.output(
        tuple(
            result if strides is None else graph.call_function(handed_out, (result, list(strides)))
            for result, strides in zip(results, layout, strict=True)
        )
    )
    return fx.GraphModule(captured, graph)


def take_as_laid_out(joint: fx.GraphModule) -> None:
    """Take out of a traced part what stands for its layout; inputs that are gradients then lie like that."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=handed_out):
        node.replace_all_uses_with(args_of(node)[0])
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=laid_out):
        grad = args_of(node)[0]
        if grad.op != "placeholder" or len(grad.users) != 1:
            raise RegionError("torch reads the gradient of a result in another way")
        node.replace_all_uses_with(grad)
        graph.erase_node(node)
        grad.meta["val"] = value_of(node)
    graph.eliminate_dead_code()
    joint.recompile()
