"""ZeRO-3: weights are gathered again in backward, never kept.

    before   gather                      the partitioner would keep the gathered weight
    after    gather  # MUST_RECOMPUTE    backward gathers again; between the two only shards live

Views of a weight are tagged with it, or the partitioner would keep a view in its place. Needs
nothing. Changes no values.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import ops
from torchloom.graph import PassContext, find

aten = torch.ops.aten
_VIEWS = frozenset(
    {
        aten.t.default,
        aten.permute.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.detach.default,
        aten.alias.default,
        aten.transpose.int,
        aten.slice.Tensor,
        aten.select.int,
    }
)


def zero3(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Tag every gather and the views of its result for recomputation; return how many gathers."""
    nodes = find(gm.graph, ops.gather)
    for node in nodes:
        chain = [node]
        for link in chain:  # grows while it is walked
            chain += [user for user in link.users if user.target in _VIEWS]
            link.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            link.meta["ac_graph_id"] = 0
    return len(nodes)
