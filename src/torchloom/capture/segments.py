"""Takes calls of bodies, and the transfers around them, out of what Inductor lowers: they need no kernels, only Python.

    before   gather_start; wait_; region 0; gather_start; wait_; region 1; ...     one node of Inductor's for each
    after    segment(shards, x)                                                    one node; its code is written here

Inductor's work for a node costs milliseconds, the same for an operator that is only called. What computes stays with
Inductor, so a norm behind the layers is fused as ever.
"""

from __future__ import annotations

import math
import operator
from collections import UserList
from collections.abc import Iterator, Sequence

from torch import Tensor, fx

from torchloom._torch.bodies import Segment, lower_segment
from torchloom._torch.tensors import layout_hint
from torchloom.graph import args_of
from torchloom.ops import gather_start, reduce_start, sync_start, wait_
from torchloom.ops.regions import half_of_node, inputs_of, is_call_of_body

_STARTS = (gather_start, reduce_start, sync_start)
"""Operators whose results are memory of their own: Inductor may take them for plain outputs of the segment."""


def fold_segments(gm: fx.GraphModule) -> None:
    """Replace each stretch of nodes that hold a call of a body and nothing that computes by one node.

    Args:
        gm: a lowered graph whose bodies are ready for Inductor; edited in place.
    """
    for number, nodes in enumerate(list(_segments(gm.graph))):
        _fold(gm.graph, nodes, number)


def _segments(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    for node in graph.nodes:
        if is_call_of_body(node) or node.target in _STARTS:
            for user in list(node.users):  # each takes one result
                node.append(user)
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _is_called_only(node, found):
            found[node] = None
        elif found:
            if any(map(is_call_of_body, found)):
                yield list(found)
            found = {}


def _is_called_only(node: fx.Node, before: dict[fx.Node, None]) -> bool:
    """Say whether a node can follow others in a segment: it writes to what begins there, and returns no views."""
    if node.target is operator.getitem:
        return node.args[0] in before
    if node.target is wait_:
        return all(each in before for each in args_of(node)[0])
    return is_call_of_body(node) or node.target in _STARTS


def _fold(graph: fx.Graph, nodes: Sequence[fx.Node], number: int) -> None:
    inside = set(nodes)
    given = dict.fromkeys(each for node in nodes for each in node.all_input_nodes)
    inputs = [each for each in given if each not in inside]
    outputs = [node for node in nodes if not inside.issuperset(node.users)]
    bodies: dict[str, fx.GraphModule] = {}
    for node in filter(is_call_of_body, nodes):
        half = half_of_node(node)
        bodies[half.name] = half.graph_module
    segment = Segment(
        f"segment_{number}",
        inputs=[each.meta["val"] for each in inputs],
        outputs=[each.meta["val"] for each in outputs],
        bodies=bodies,
        lines=_code(nodes, inputs, outputs),
    )
    with graph.inserting_before(nodes[0]):
        call = graph.call_function(lower_segment(segment), tuple(inputs))
    # Torch's trees take it for one value: for each result Inductor's passes would look at all of them.
    call.meta["val"] = UserList(segment.outputs)
    after = call
    for index, node in enumerate(outputs):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (call, index))
        after.meta = dict(node.meta)
        node.replace_all_uses_with(after, lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)


def _code(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> list[str]:
    """Return the body of a function of `args`, a list that it empties; each value is dropped at its last use."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last.update(dict.fromkeys((*node.all_input_nodes, node), node))
    dropped: dict[fx.Node, list[str]] = {node: [] for node in nodes}
    for value in last.keys() - set(outputs):
        dropped[last[value]].append(f"{value} = None")
    names = ", ".join(each.name for each in inputs)
    lines = [f"{names}, = args", "args.clear()"]
    for node in nodes:
        if is_call_of_body(node):  # the body frees what it is given
            lines += [f"args = [{', '.join(_given(node))}]", *sorted(dropped[node])]
            lines.append(f"{node} = {half_of_node(node).name}(args)")
            continue
        if node.target is operator.getitem:
            lines.append(f"{node} = {node.args[0]}[{node.args[1]}]")
        else:
            lines.append(f"{node} = torch.ops.{node.target}{tuple(args_of(node))}")
        lines += sorted(dropped[node])
    return [*lines, f"return {list(outputs)}"]


def _given(call: fx.Node) -> Iterator[str]:
    """Yield the text of each input of a call, laid out as the code of the body takes it: that of the first of equal layers."""
    graph = half_of_node(call).graph_module.graph
    for each, taken in zip(inputs_of(call), graph.find_nodes(op="placeholder"), strict=True):
        order = _dims_by_stride(taken)
        if order is None or order == _dims_by_stride(each):
            yield str(each)
        else:
            back = sorted(range(len(order)), key=order.__getitem__)
            yield f"{each}.permute({order}).contiguous().permute({back})"


def _dims_by_stride(node: fx.Node) -> list[int] | None:
    """Return the dims of a tensor from the outermost to the innermost; None of what has holes, or is no tensor."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return None
    shape, strides, length = layout_hint(value)
    if math.prod(shape) != length:
        return None
    # Dims of one element lie anywhere, and make no difference.
    return sorted(range(len(shape)), key=lambda dim: (shape[dim] == 1, -strides[dim]))
