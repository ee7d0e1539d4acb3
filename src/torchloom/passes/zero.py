"""The ZeRO stages, and what a plan recomputes: tags that the partitioner follows.

    zero1       before   sync(grad, own_slice=False)      an all-reduce
                after    sync(grad, own_slice=True)       half its traffic: a reduce-scatter in place
    zero2       before   gather                           the partitioner decides
                after    gather  # MUST_SAVE              one gather a micro-step, the weight lives until its gradient
    zero3       before   gather                           the partitioner would keep the gathered weight
                after    gather  # MUST_RECOMPUTE         backward gathers again; between the two only shards live
    recompute   before   x                                the partitioner decides
                after    x  # MUST_RECOMPUTE              for every value that the plan drops
                         y  # MUST_SAVE                   for every other one that backward reads

`zero1` leaves weights whole; slices keep their values. `zero2` tags resident weights as recomputed, `zero3` tags
views and casts of a weight, too. `recompute` needs a plan (`ctx.choices`); without one the partitioner's own rule stands.
Only operators that give the same value twice are ever computed twice (Chen et al., "Training Deep Nets with Sublinear
Memory Cost", arXiv 1604.06174). Changes no values.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import ops
from torchloom.graph import PassContext, args_of, droppable, find, forward_nodes, source_of, tag
from torchloom.ops.match import with_views


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


def zero2(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Tag every gather as one whose result is saved; return how many gathers."""
    nodes = find(gm.graph, ops.gather)
    resident = frozenset() if ctx.choices is None else ctx.choices.resident
    for node in nodes:
        *_, handle, param = args_of(node)
        if ctx.is_about(handle) and param in resident:
            for link in with_views(node):
                tag(link, CheckpointPolicy.MUST_RECOMPUTE)
        else:
            tag(node, CheckpointPolicy.MUST_SAVE)
    return len(nodes)


def zero3(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Tag every gather, and views and casts of its result, for recomputation; return how many gathers."""
    nodes = find(gm.graph, ops.gather)
    for node in nodes:
        for link in with_views(node):
            tag(link, CheckpointPolicy.MUST_RECOMPUTE)
    return len(nodes)


def recompute(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Tag the values of the forward half; return how many are computed again."""
    if ctx.choices is None or ctx.choices.recompute is None:
        return 0
    num_dropped = 0
    may_drop = droppable(gm.graph)
    for node in forward_nodes(gm.graph):
        if "recompute" in node.meta:  # decided before: gathered weights, the user's checkpoints
            continue
        source = source_of(node)
        is_chosen = source in may_drop and (
            source.name in ctx.choices.recompute or not source.all_input_nodes
        )  # constants are cheaper to make again than to keep
        drop = is_chosen or source.op != "call_function" or (node is not source and _views(node))
        num_dropped += is_chosen and node is source
        tag(node, CheckpointPolicy.MUST_RECOMPUTE if drop else CheckpointPolicy.MUST_SAVE)
    return num_dropped


def _views(node: fx.Node) -> bool:
    """Say whether a node views a tensor, and does not just pick one of several results."""
    return getattr(node.target, "__name__", "") != "getitem"
