"""Split each gather, reduction and copy into a start and a wait.

    before   w = gather(shard)                 s = reduce(grad)            h = offload(x)
    after    [f] = gather_start([shard])       [s] = reduce_start([grad])  [h] = offload_start([x])
             wait_([f], [shard])               wait_([s], [grad])          wait_([h], [x])
             w = view(slice(f))

Start and wait stand together; `bucket`, `prefetch` and `overlap_copies` move them. Changes no values.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from torchloom import ops
from torchloom._torch.inductor import REALIZED_TO_STRIDES
from torchloom.graph import (
    PassContext,
    args_of,
    call,
    find,
    first_call,
    front_as,
    is_on_host,
    mark_host,
    replace,
)


def place(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Expand every traced operator; return how many."""
    graph = gm.graph
    traced = {op: find(graph, op) for op in _PLACED}
    for op, nodes in traced.items():
        for node in nodes:
            _PLACED[op](graph, node, ctx)
    return sum(map(len, traced.values()))


def _place_gather(graph: fx.Graph, node: fx.Node, ctx: PassContext) -> None:
    shard, shape, dtype, _wire_dtype, handle, param = args_of(node)
    with graph.inserting_before(node):
        args = ([shard], [param], dtype, ctx.world_size, handle)
        flat = _start_and_wait(graph, ops.gather_start, args, param)
        weight = front_as(graph, flat, shape, _name(param))
    weight.meta["recompute"] = node.meta.get("recompute")
    replace(node, weight)


def _place_reduce(graph: fx.Graph, node: fx.Node, ctx: PassContext) -> None:
    grad, shard_numel, dtype, wire_dtype, handle, param = args_of(node)
    args = ([grad], [param], [shard_numel], dtype, wire_dtype, handle)
    _place_reduction(graph, node, ops.reduce_start, args)


def _place_sync(graph: fx.Graph, node: fx.Node, ctx: PassContext) -> None:
    grad, dtype, wire_dtype, own_slice, handle, param = args_of(node)
    args = ([grad], [param], dtype, wire_dtype, own_slice, handle)
    _keep_strides(grad)
    _place_reduction(graph, node, ops.sync_start, args)


def _place_offload(graph: fx.Graph, node: fx.Node, ctx: PassContext) -> None:
    x, *pin = args_of(node)
    _keep_strides(x)
    _place_copy(graph, node, ops.offload_start, ([x], *pin), before=node)


def _place_reload(graph: fx.Graph, node: fx.Node, ctx: PassContext) -> None:
    host, device = args_of(node)
    before = first_call(graph) if host.op == "placeholder" else node
    _place_copy(graph, node, ops.reload_start, ([host], device), before=before)


_PLACED = {
    ops.gather: _place_gather,
    ops.reduce: _place_reduce,
    ops.sync: _place_sync,
    ops.offload: _place_offload,
    ops.reload: _place_reload,
}


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


def _start_and_wait(graph: fx.Graph, start: object, args: Sequence[object], param: str) -> fx.Node:
    issued = call(graph, start, args)
    result = call(graph, operator.getitem, (issued, 0), name=f"{_name(param)}_flat")
    call(graph, ops.wait_, ([result], args[0], args[-1]))
    return result


def _name(param: str) -> str:
    return param.replace(".", "_")
