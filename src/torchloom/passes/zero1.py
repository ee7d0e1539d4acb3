"""ZeRO-1: average only the slice of a gradient that this rank's optimizer steps.

    before   sync(grad, own_slice=False)     an all-reduce
    after    sync(grad, own_slice=True)      half its traffic: a reduce-scatter in place

Weights stay whole. The slices keep their values.
"""

from __future__ import annotations

from torch import fx

from torchloom import ops
from torchloom.graph import PassContext, args_of, find


def zero1(gm: fx.GraphModule, ctx: PassContext, *, params: tuple[str, ...] = ()) -> int:
    """Narrow the synchronisation of sliced parameters; return how many.

    Args:
        gm: a joint graph; edited in place.
        ctx: tells which communicator is this model's.
        params: names of whole parameters of which each rank's optimizer steps its own slice alone.
    """
    num_narrowed = 0
    for node in find(gm.graph, ops.sync):
        grad, dtype, wire_dtype, own_slice, handle, param = args_of(node)
        if ctx.is_about(handle) and param in params and not own_slice:
            node.args = (grad, dtype, wire_dtype, True, handle, param)
            num_narrowed += 1
    return num_narrowed
