"""Weights that need no gather: those in shared memory, and those that stay gathered.

    symmetric_gathers   before   w = gather(shard)
                        after    [f] = symmetric_start([shard])        at the top: a view, nothing is copied
                                 wait_([f], [shard])                   before the first weight is read
                                 w = view(slice(f))
                                 symmetric_done_([f])                  at the end: now the weights may change
    selective_gather    before   [f] = gather_start([shard]) .. wait_([f])     in forward and in backward
                        after    f = resident(shard)                           gathered once per optimizer step

Which parameters are resident is the plan's choice, or that of a custom pass (`nz3.set_persistent`). A weight that leaves
the graph, or that an operator may overwrite, is gathered as before. Changes no values.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import fx

from torchloom import ops
from torchloom.graph import (
    PassContext,
    SharedWeights,
    args_of,
    call,
    find,
    first_call,
    front_as,
    is_only_read,
    mark_fetched,
    replace,
    value_of,
)
from torchloom.ops.match import Transfer, gathers, reloads


def symmetric_gathers(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replace gathers of shared weights by views; return how many."""
    shared = ctx.shared_weights
    if shared is None:
        return 0
    by_dtype: defaultdict[torch.dtype, list[fx.Node]] = defaultdict(list)
    for node in _eligible(gm.graph, shared):
        by_dtype[args_of(node)[2]].append(node)
    for dtype, nodes in by_dtype.items():
        _view(gm.graph, nodes, dtype, shared, ctx.world_size)
    return sum(map(len, by_dtype.values()))


def _eligible(graph: fx.Graph, shared: SharedWeights) -> list[fx.Node]:
    gathers = [node for node in find(graph, ops.gather) if _is_shared(node, shared)]
    shards: defaultdict[str, set[fx.Node]] = defaultdict(set)
    for node in gathers:
        shards[args_of(node)[5]].add(args_of(node)[0])
    # Two shards with one name belong to two models; the graph does not tell which is ours.
    return [n for n in gathers if len(shards[args_of(n)[5]]) == 1 and is_only_read(n)]


def _is_shared(node: fx.Node, shared: SharedWeights) -> bool:
    shard, _shape, dtype, _wire, handle, param = args_of(node)
    return handle == shared.handle and shard.op == "placeholder" and (param, dtype) in shared.params


def _view(
    graph: fx.Graph,
    gathers: list[fx.Node],
    dtype: torch.dtype,
    shared: SharedWeights,
    world_size: int,
) -> None:
    first: dict[str, fx.Node] = {}
    for node in gathers:
        first.setdefault(args_of(node)[5], node)
    shards = [args_of(node)[0] for node in first.values()]
    names = [name for name, _ in shared.params]
    places = [names.index(name) for name in first]
    with graph.inserting_before(first_call(graph)):
        args = (shards, places, dtype, world_size, shared.name)
        start = call(graph, ops.symmetric_start, args)
        flats = [
            call(graph, operator.getitem, (start, i), name=f"{name.replace('.', '_')}_whole")
            for i, name in enumerate(first)
        ]
    flat_of = dict(zip(first, flats, strict=True))
    with graph.inserting_before(gathers[0]):
        call(graph, ops.wait_, (flats, shards, shared.handle))
    for node in gathers:
        _place(graph, node, flat_of[args_of(node)[5]])
    with graph.inserting_before(graph.output_node()):
        call(graph, ops.symmetric_done_, (flats, shared.name))


def _place(graph: fx.Graph, node: fx.Node, flat: fx.Node) -> None:
    with graph.inserting_before(node):
        weight = front_as(graph, flat, args_of(node)[1])
    weight.meta["recompute"] = node.meta.get("recompute")
    replace(node, weight)


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
