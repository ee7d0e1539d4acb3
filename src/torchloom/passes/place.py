"""Split each gather, reduction and copy into a start and a wait.

    before   w = gather(shard)                 s = reduce(grad)            h = offload(x)
    after    [f] = gather_start([shard])       [s] = reduce_start([grad])  [h] = offload_start([x])
             wait_([f], [shard])               wait_([s], [grad])          wait_([h], [x])
             w = view(slice(f))

Start and wait stand together; `bucket`, `prefetch` and `overlap_copies` move them. Changes no values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from torchloom import ops
from torchloom._torch.inductor import REALIZED_TO_STRIDES
from torchloom.graph import (
    PassContext,
    args_of,
    call,
    find,
    is_on_host,
    mark_host,
    replace,
    value_of,
)

aten = torch.ops.aten


def place(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Expand every traced operator; return how many."""
    graph = gm.graph
    num_placed = 0
    for node in find(graph, ops.gather):
        _place_gather(graph, node, ctx.world_size)
        num_placed += 1
    for node in find(graph, ops.reduce):
        grad, shard_numel, dtype, wire_dtype, handle, param = args_of(node)
        args = ([grad], [param], [shard_numel], dtype, wire_dtype, handle)
        _place_reduction(graph, node, ops.reduce_start, args)
        num_placed += 1
    for node in find(graph, ops.sync):
        grad, dtype, wire_dtype, own_slice, handle, param = args_of(node)
        args = ([grad], [param], dtype, wire_dtype, own_slice, handle)
        _keep_strides(grad)
        _place_reduction(graph, node, ops.sync_start, args)
        num_placed += 1
    for node in find(graph, ops.offload):
        x, *pin = args_of(node)
        _keep_strides(x)
        _place_copy(graph, node, ops.offload_start, ([x], *pin), before=node)
        num_placed += 1
    for node in find(graph, ops.reload):
        host, device = args_of(node)
        before = _head(graph) if host.op == "placeholder" else node
        _place_copy(graph, node, ops.reload_start, ([host], device), before=before)
        num_placed += 1
    return num_placed


def _place_gather(graph: fx.Graph, node: fx.Node, world_size: int) -> None:
    shard, shape, dtype, _wire_dtype, handle, param = args_of(node)
    with graph.inserting_before(node):
        args = ([shard], [param], dtype, world_size, handle)
        flat = _start_and_wait(graph, ops.gather_start, args, param)
        flat = _without_padding(graph, flat, shape)
        weight = call(graph, aten.view.default, (flat, list(shape)), name=_name(param))
    weight.meta["recompute"] = node.meta.get("recompute")
    replace(node, weight)


def _without_padding(graph: fx.Graph, flat: fx.Node, shape: Sequence[int | fx.Node]) -> fx.Node:
    """Return the front of `flat` that is a weight of `shape`, whose sizes may be values of the graph."""
    numel: int | fx.Node = math.prod(size for size in shape if isinstance(size, int))
    for size in shape:
        if isinstance(size, fx.Node):
            numel = call(graph, operator.mul, (size, numel))
    if isinstance(numel, int) and value_of(flat).numel() == numel:
        return flat
    return call(graph, aten.slice.Tensor, (flat, 0, 0, numel))


def _place_reduction(graph: fx.Graph, node: fx.Node, start: object, args: Sequence[object]) -> None:
    with graph.inserting_before(node):
        result = _start_and_wait(graph, start, args, f"{args_of(node)[-1]}_grad")
    replace(node, result)


def _place_copy(
    graph: fx.Graph, node: fx.Node, start: object, args: Sequence[object], before: fx.Node
) -> None:
    with graph.inserting_before(before):
        issued = call(graph, start, args)
        result = call(graph, operator.getitem, (issued, 0), name=node.name)
        call(graph, ops.wait_, ([result], args[0], ops.HOST))
    if is_on_host(node):
        mark_host(issued, result)
    replace(node, result)


def _keep_strides(x: fx.Node) -> None:
    """Let a compiler lay a value out as recorded, so that what is made of it is, too.

    A result that is also an output must have the recorded strides. Inductor lays values out as it
    likes, and would copy such a result into these strides as soon as it is started, not when it has
    arrived.
    """
    x.meta[REALIZED_TO_STRIDES] = True


def _head(graph: fx.Graph) -> fx.Node:
    """Return the first node that is not an input."""
    return next(node for node in graph.nodes if node.op != "placeholder")


def _start_and_wait(graph: fx.Graph, start: object, args: Sequence[object], param: str) -> fx.Node:
    issued = call(graph, start, args)
    result = call(graph, operator.getitem, (issued, 0), name=f"{_name(param)}_flat")
    call(graph, ops.wait_, ([result], args[0], args[-1]))
    return result


def _name(param: str) -> str:
    return param.replace(".", "_")
