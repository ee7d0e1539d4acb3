"""ZeRO-3: gather weights again in backward instead of keeping them.

    before   gather                      the partitioner would keep the gathered weight
    after    gather  # MUST_RECOMPUTE    backward gathers again; between the two only shards live

Views and casts of a weight are tagged, too. Changes no values.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import ops
from torchloom.graph import PassContext, find, tag
from torchloom.ops.match import with_views


def zero3(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Tag every gather, and views and casts of its result, for recomputation; return how many gathers."""
    nodes = find(gm.graph, ops.gather)
    for node in nodes:
        for link in with_views(node):
            tag(link, CheckpointPolicy.MUST_RECOMPUTE)
    return len(nodes)
