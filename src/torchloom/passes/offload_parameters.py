"""Keep shards of parameters in host memory and reload them before they are gathered.

    before   w = gather(shard)
    after    s = reload(shard), w = gather(s)

The shard on the device is freed after each gather; backward reloads again. Changes no values.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import ops
from torchloom.graph import PassContext, args_of, call, find, value_of


def offload_parameters(
    gm: fx.GraphModule, ctx: PassContext, *, params: tuple[str, ...] = ()
) -> int:
    """Insert a reload before each gather of a shard on the host; return how many.

    Args:
        gm: a joint graph; edited in place.
        ctx: tells which communicator is this model's.
        params: names of sharded parameters whose shards can wait in host memory.
    """
    chosen = set(params)
    nodes = [node for node in find(gm.graph, ops.gather) if _names_one_of(node, chosen, ctx)]
    for node in nodes:
        shard = args_of(node)[0]
        with gm.graph.inserting_before(node):
            args = (shard, value_of(shard).device)
            back = call(gm.graph, ops.reload, args, name=f"{shard.name}_back")
        back.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        back.meta["ac_graph_id"] = 0
        node.args = (back, *args_of(node)[1:])
    return len(nodes)


def _names_one_of(gather: fx.Node, chosen: Collection[str], ctx: PassContext) -> bool:
    *_, handle, param = args_of(gather)
    return ctx.is_about(handle) and param in chosen
