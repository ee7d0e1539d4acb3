"""Compute chosen activations again in backward, instead of keeping them from forward.

    before   x                          the partitioner decides
    after    x  # MUST_RECOMPUTE        for every value that the plan drops
             y  # MUST_SAVE             for every other one that backward reads

Needs a plan (`ctx.choices`); without one the partitioner's own rule stands. Changes no values: only operators
that give the same value twice are ever computed twice (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv
1604.06174).
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom.graph import PassContext, droppable, forward_nodes, source_of, tag


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
