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
from typing import Any

import torch
from torch import fx

from torchloom import ops
from torchloom._torch.inductor import ops_made_in_place
from torchloom._torch.operators import OpOverload
from torchloom.graph import (
    PassContext,
    SharedWeights,
    args_of,
    call,
    find,
    is_view,
    replace,
    value_of,
)

aten = torch.ops.aten


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
    return [n for n in gathers if len(shards[args_of(n)[5]]) == 1 and _is_only_read(n)]


def _is_shared(node: fx.Node, shared: SharedWeights) -> bool:
    shard, _shape, dtype, _wire, handle, param = args_of(node)
    return handle == shared.handle and shard.op == "placeholder" and (param, dtype) in shared.params


def _is_only_read(weight: fx.Node) -> bool:
    chain = [weight]
    for node in chain:  # grows while it is walked
        for user in node.users:
            if _makes_nothing(user):
                chain.append(user)
            elif not _only_reads(user):
                return False
    return True


def _makes_nothing(node: fx.Node) -> bool:
    """Say whether a node returns the memory of its input: a view, or a cast to the dtype it has."""
    if node.target is torch.ops.prims.convert_element_type.default:
        source = args_of(node)[0]
        return value_of(source) is not None and value_of(source).dtype == args_of(node)[1]
    return is_view(node)


def _only_reads(node: fx.Node) -> bool:
    return (
        isinstance(node.target, OpOverload)
        and not node.target._schema.is_mutable
        and node.target not in ops_made_in_place()
    )


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
    with graph.inserting_before(_first_call(graph)):
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


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def _place(graph: fx.Graph, node: fx.Node, flat: fx.Node) -> None:
    shape: Any = args_of(node)[1]
    numel = value_of(node).numel()
    with graph.inserting_before(node):
        if value_of(flat).numel() != numel:
            flat = call(graph, aten.slice.Tensor, (flat, 0, 0, numel))
        weight = call(graph, aten.view.default, (flat, list(shape)))
    weight.meta["recompute"] = node.meta.get("recompute")
    replace(node, weight)
