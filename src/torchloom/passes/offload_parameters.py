"""Keep shards of parameters in host memory and reload them before they are gathered.

    before   w = gather(shard)
    after    s = reload(shard), w = gather(s)

The shard on the device is freed after each gather; backward reloads again. Changes no values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import ops
from torchloom.graph import PassContext, args_of, call, find, nbytes, tag, value_of


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
    nodes = [
        node
        for node in find(gm.graph, ops.gather)
        if ctx.is_about(args_of(node)[-2]) and args_of(node)[-1] in chosen
    ]
    for node in nodes:
        shard = args_of(node)[0]
        with gm.graph.inserting_before(node):
            args = (shard, value_of(shard).device)
            back = call(gm.graph, ops.reload, args, name=f"{shard.name}_back")
        tag(back, CheckpointPolicy.MUST_RECOMPUTE)
        node.args = (back, *args_of(node)[1:])
    return len(nodes)


def reloaded_bytes(joint: fx.GraphModule) -> dict[str, int]:
    """Return the bytes of the shards that wait on the host, by the names of parameters."""
    return {name: nbytes(reload) for name, reload in _reloads(joint)}


def keep_shards(joint: fx.GraphModule, names: Collection[str]) -> None:
    """Remove the reloads of these parameters: their gathers read a shard that stays on the device."""
    # A shard that is gathered in two dtypes is reloaded once.
    for reload in dict.fromkeys(each for name, each in _reloads(joint) if name in names):
        reload.replace_all_uses_with(args_of(reload)[0])
        joint.graph.erase_node(reload)


def _reloads(joint: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    """Yield what reloads shards from the host, with the names of their parameters."""
    for gather in find(joint.graph, ops.gather):
        shard = args_of(gather)[0]
        if shard.target is ops.reload:
            yield args_of(gather)[-1], shard


def offload_opt_states(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Leave the graph as it is."""
    return 0
