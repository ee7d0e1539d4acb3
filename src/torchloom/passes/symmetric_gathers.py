"""Read weights in shared memory in place, without a gather.

    before   w = gather(shard)
    after    [f] = symmetric_start([shard])        at the top: a view, nothing is copied
             wait_([f], [shard])                   before the first weight is read
             w = view(slice(f))
             symmetric_done_([f])                  at the end: now the weights may change

A weight that leaves the graph or may be written is gathered as before. Changes no values.
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
    replace,
)


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
