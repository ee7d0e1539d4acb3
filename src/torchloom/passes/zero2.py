"""ZeRO-2: keep gathered weights from forward to backward.

    before   gather                 the partitioner decides
    after    gather  # MUST_SAVE    one gather a micro-step, the weight lives until its gradient

Resident weights are tagged as recomputed. Changes no values.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import ops
from torchloom.graph import PassContext, args_of, find, tag
from torchloom.ops.match import with_views


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
