"""Cast a weight before gathering it, if the graph reads it only in a lower dtype.

    before   w = gather(p, f32)   c = cast(w, bf16)   d = cast(t(w), bf16)      4 bytes per element travel
    after    w = gather(p, bf16)  (c is w)            (d is t(w))               each rank casts its shard: 2

`torch.autocast` makes such graphs. A weight that anything reads uncast (a norm, a tied embedding), that leaves
the graph or is cast to two dtypes stays as it is. Changes no values.
"""

from __future__ import annotations

from torch import fx

from torchloom import ops
from torchloom.graph import PassContext, args_of, call, find, lower_readers, read_lower


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
