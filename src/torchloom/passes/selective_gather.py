"""Read resident weights instead of gathering them.

    before   [f] = gather_start([shard]) .. wait_([f])     in forward and in backward
    after    f = resident(shard)                           gathered once per optimizer step

Which parameters are resident is the plan's choice, or that of a custom pass (`nz3.set_persistent`).
A weight that leaves the graph, or that an operator may overwrite, is gathered as before. Changes
no values.
"""

from __future__ import annotations

import operator

from torch import fx

from torchloom import ops
from torchloom.graph import PassContext, args_of, call, is_only_read, mark_fetched, value_of
from torchloom.ops.match import Transfer, gathers, reloads


def selective_gather(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replace the gathers of resident parameters; return how many."""
    chosen = frozenset() if ctx.choices is None else ctx.choices.resident
    num = sum(_replace_members(gm.graph, each, ctx, chosen) for each in gathers(gm.graph))
    if num:
        _drop_unread_reloads(gm.graph, ctx)
    return num


def _replace_members(
    graph: fx.Graph, transfer: Transfer, ctx: PassContext, chosen: frozenset[str]
) -> int:
    shards, params, dtype, world_size, handle = args_of(transfer.start)
    pieces = [_piece_of(shard) for shard in shards]
    names = [ctx.params.get(piece.name, "") for piece in pieces]
    if not ctx.is_about(handle):
        return 0
    stays = [
        name not in chosen or not is_only_read(pick, {transfer.wait})
        for name, pick in zip(names, transfer.results, strict=True)
    ]
    if all(stays):
        return 0
    with graph.inserting_before(transfer.start):
        for stay, shard, piece, name, pick in zip(
            stays, shards, pieces, names, transfer.results, strict=True
        ):
            if not stay:
                args = (piece, dtype, world_size, handle, name)
                weight = call(graph, ops.resident, args)
                if piece is not shard:
                    mark_fetched(weight)
                pick.replace_all_uses_with(weight, lambda user: user is not transfer.wait)
        rest = [shard for stay, shard in zip(stays, shards, strict=True) if stay]
        kept = [pick for stay, pick in zip(stays, transfer.results, strict=True) if stay]
        if rest:
            left = [param for stay, param in zip(stays, params, strict=True) if stay]
            args = (rest, left, dtype, world_size, handle)
            start = call(graph, transfer.start.target, args)
            for index, pick in enumerate(kept):
                pick.args = (start, index)
                pick.meta["val"] = value_of(start)[index]
            transfer.wait.args = (kept, rest, handle)
    if not rest:
        graph.erase_node(transfer.wait)
    for stay, pick in zip(stays, transfer.results, strict=True):
        if not stay:
            graph.erase_node(pick)
    graph.erase_node(transfer.start)
    return stays.count(False)


def _piece_of(shard: fx.Node) -> fx.Node:
    """Return the input that a shard is, or that it is reloaded from."""
    if shard.target is operator.getitem:
        start, index = args_of(shard)
        if start.target is ops.reload_start:
            return args_of(start)[0][index]
    return shard


def _drop_unread_reloads(graph: fx.Graph, ctx: PassContext) -> None:
    """Remove reloads of shards that no node reads: a resident weight is gathered from the shard itself."""
    for transfer in reloads(graph):
        pieces_only = all(source.name in ctx.params for source in transfer.inputs)
        if pieces_only and all(set(pick.users) <= {transfer.wait} for pick in transfer.results):
            for node in (transfer.wait, *transfer.results, transfer.start):
                graph.erase_node(node)
