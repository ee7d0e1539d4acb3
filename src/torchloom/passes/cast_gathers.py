"""Cast a weight before gathering it, if the graph reads it only in a lower dtype.

    before   w = gather(p, f32)   c = cast(w, bf16)   d = cast(t(w), bf16)      4 bytes per element travel
    after    w = gather(p, bf16)  (c is w)            (d is t(w))               each rank casts its shard: 2

`torch.autocast` makes such graphs: they gather weights in the dtype in which these are kept, and cast them
where a product reads them. The pass leaves a weight alone if anything reads it uncast, in forward or in
backward (a norm, an embedding that is tied to the head), if it leaves the graph, or if it is cast to two
dtypes. It does not change the reduction of gradients: the joint graph already holds the derivative of the
cast. Needs nothing. Changes no values, as each element is cast alone.
"""

from __future__ import annotations

import torch
from torch import fx

from torchloom import ops
from torchloom.graph import PassContext, args_of, call, find, replace, value_of

aten = torch.ops.aten
_CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})
_TRAVELS = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Not all transports know narrower ones."""
_REORDERS = frozenset(
    {
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.detach.default,
        aten.alias.default,
    }
)
"""Views of all elements of a weight, each of them once."""


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
    readers = _readers(gather)
    if readers is None:
        return False
    views, casts = readers
    dtypes = {value_of(cast).dtype for cast in casts}
    if len(dtypes) != 1 or not _is_lower(dtype := dtypes.pop(), value_of(gather).dtype):
        return False
    with graph.inserting_before(gather):
        lower = call(graph, ops.gather, (shard, shape, dtype, wire_dtype, handle, param))
    lowered = {gather: lower}
    for view in views:  # in the order in which they depend on each other
        source = lowered[args_of(view)[0]]
        with graph.inserting_before(view):
            lowered[view] = call(graph, view.target, (source, *args_of(view)[1:]), name=view.name)
    for cast in casts:
        replace(cast, lowered[args_of(cast)[0]])
    for node in (*reversed(views), gather):
        graph.erase_node(node)
    return True


def _may_travel_cast(param: str, ctx: PassContext, params: tuple[str, ...] | None) -> bool:
    if params is not None and param not in params:
        return False
    shared = ctx.shared_weights  # those are read where they are, and do not travel
    return shared is None or param not in {name for name, _ in shared.params}


def _readers(gather: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """Return the views and the casts of a weight; None if anything else reads it."""
    views, casts = list[fx.Node](), list[fx.Node]()
    chain = [gather]
    for node in chain:  # grows while it is walked
        for user in node.users:
            if user.target in _CASTS and _only_casts(user, node):
                casts.append(user)
            elif user.target in _REORDERS and not user.kwargs:
                views.append(user)
                chain.append(user)
            else:
                return None
    return views, casts


def _only_casts(cast: fx.Node, source: fx.Node) -> bool:
    """Say whether a cast changes the dtype and neither device nor layout, so that its input can stand for it."""
    before, after = value_of(source), value_of(cast)
    return before.device == after.device and before.stride() == after.stride()


def _is_lower(dtype: torch.dtype, kept: torch.dtype) -> bool:
    return dtype in _TRAVELS and kept.is_floating_point and dtype.itemsize < kept.itemsize
