"""Fewer and smaller transfers of parameters: one gather for each, in the dtype that is read, and no copy of whole ones.

    dedupe_gathers   before   w1 = gather(p)   w2 = gather(p)      reduce(g1) + reduce(g2)
                     after    w1 = gather(p)   (w2 is w1)          reduce(g1 + g2)
    cast_gathers     before   w = gather(p, f32)   c = cast(w, bf16)   d = cast(t(w), bf16)    4 bytes per element travel
                     after    w = gather(p, bf16)  (c is w)            (d is t(w))             each rank casts its shard: 2
    elide_copies     before   w = replicate(p)     a copy in eager code, so that the operator has no alias
                     after    w = p                or a cast, where the compute dtype differs

`dedupe_gathers`: tied parameters and those of a module used repeatedly are gathered once; their gradients are summed
locally, then reduced once, which changes the order in which they are added. The others change no values. `cast_gathers`:
`torch.autocast` makes such graphs; a weight that anything reads uncast (a norm, a tied embedding), that leaves the graph or
is cast to two dtypes stays as it is.
"""

from __future__ import annotations

import torch
from torch import fx

from torchloom import ops
from torchloom.graph import (
    PassContext,
    args_of,
    call,
    find,
    lower_readers,
    read_lower,
    replace,
    value_of,
)

aten = torch.ops.aten


def dedupe_gathers(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Merge gathers, copies and reductions of the same parameter; return how many went away."""
    num_merged = 0
    for op in (ops.gather, ops.replicate):
        first: dict[tuple[object, ...], fx.Node] = {}
        for node in find(gm.graph, op):
            key = tuple(tuple(each) if isinstance(each, list) else each for each in args_of(node))
            if key in first:
                replace(node, first[key])
                num_merged += 1
            else:
                first[key] = node
    return num_merged + sum(_merge_sum(gm.graph, op) for op in (ops.reduce, ops.sync))


def _merge_sum(graph: fx.Graph, op: object) -> int:
    """Turn `op(a) + op(b)` into `op(a + b)` for gradients of one parameter."""
    num_merged = 0
    for node in find(graph, aten.add.Tensor):
        left, right = args_of(node)[:2]
        if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)) or node.kwargs:
            continue
        is_pair = (
            left.target is op and right.target is op and args_of(left)[1:] == args_of(right)[1:]
        )
        if not is_pair or len(left.users) > 1 or len(right.users) > 1:
            continue
        with graph.inserting_before(node):
            total = call(graph, aten.add.Tensor, (args_of(left)[0], args_of(right)[0]))
            merged = call(graph, op, (total, *args_of(left)[1:]))
        replace(node, merged)
        graph.erase_node(left)
        graph.erase_node(right)
        num_merged += 1
    return num_merged


def cast_gathers(
    gm: fx.GraphModule, ctx: PassContext, *, params: tuple[str, ...] | None = None
) -> int:
    """Cast before gathering where that changes no value; return how many gathers.

    Args:
        gm: a joint graph; edited in place.
        ctx: weights in shared memory do not travel and are left alone.
        params: names of parameters that may be cast before they are gathered; None: all.
    """
    gathers = find(gm.graph, ops.gather)
    return sum(_cast_first(gm.graph, node, ctx, params) for node in gathers)


def _cast_first(
    graph: fx.Graph, gather: fx.Node, ctx: PassContext, params: tuple[str, ...] | None
) -> bool:
    shard, shape, _dtype, wire_dtype, handle, param = args_of(gather)
    if ctx.is_about(handle) and not _may_travel_cast(param, ctx, params):
        return False
    readers = lower_readers(gather)
    if readers is None:
        return False
    with graph.inserting_before(gather):
        lower = call(graph, ops.gather, (shard, shape, readers.dtype, wire_dtype, handle, param))
    read_lower(graph, gather, lower, readers)
    graph.erase_node(gather)
    return True


def _may_travel_cast(param: str, ctx: PassContext, params: tuple[str, ...] | None) -> bool:
    if params is not None and param not in params:
        return False
    shared = ctx.shared_weights  # those are read where they are, and do not travel
    return shared is None or param not in {name for name, _ in shared.params}


def elide_copies(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replace copies of whole parameters by the parameters; return how many."""
    nodes = find(gm.graph, ops.replicate)
    for node in nodes:
        whole, dtype = args_of(node)[:2]
        if value_of(whole).dtype == dtype:
            replace(node, whole)
            continue
        with gm.graph.inserting_before(node):
            cast = call(gm.graph, torch.ops.prims.convert_element_type.default, (whole, dtype))
        replace(node, cast)
    return len(nodes)
