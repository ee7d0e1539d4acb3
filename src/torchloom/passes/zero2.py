"""ZeRO-2: gathered weights are kept from forward to backward.

    before   gather                 the partitioner decides
    after    gather  # MUST_SAVE    one gather a micro-step, the weight lives until its gradient

Gradients are reduced to shards by the gathers' own derivatives. Needs nothing. Changes no values.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import ops
from torchloom.graph import PassContext, find


def zero2(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Tag every gather as one whose result is saved; return how many."""
    nodes = find(gm.graph, ops.gather)
    for node in nodes:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        node.meta["ac_graph_id"] = 0
    return len(nodes)
