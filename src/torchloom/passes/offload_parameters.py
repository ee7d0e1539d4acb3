"""Pieces of parameters wait in host memory and are reloaded before they are gathered.

    before   w = gather(piece)
    after    p = reload(piece), w = gather(p)

Applies to the parameters that the context names; the engine keeps their pieces on the host. The
reload is computed again wherever the gather is, so the piece on the device dies with its gather.
Needs: zero. Changes no values.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import ops
from torchloom.graph import PassContext, args_of, call, find, value_of


def offload_parameters(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Insert a reload before each gather of a piece on the host; return how many."""
    chosen = set(ctx.host_params)
    nodes = [node for node in find(gm.graph, ops.gather) if _names_one_of(node, chosen, ctx)]
    for node in nodes:
        piece = args_of(node)[0]
        with gm.graph.inserting_before(node):
            args = (piece, value_of(piece).device)
            back = call(gm.graph, ops.reload, args, name=f"{piece.name}_back")
        back.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        back.meta["ac_graph_id"] = 0
        node.args = (back, *args_of(node)[1:])
    return len(nodes)


def _names_one_of(gather: fx.Node, chosen: Collection[str], ctx: PassContext) -> bool:
    *_, handle, param = args_of(gather)
    return ctx.is_about(handle) and param in chosen
