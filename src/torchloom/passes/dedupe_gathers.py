"""One gather per parameter and graph, one reduction per parameter.

    before   w1 = gather(p)   w2 = gather(p)      reduce(g1) + reduce(g2)
    after    w1 = gather(p)   (w2 is w1)          reduce(g1 + g2)

Tied parameters and those of a module used repeatedly are gathered once; their gradients are summed locally, then
reduced once. Changes the order in which gradients are added.
"""

from __future__ import annotations

import torch
from torch import fx

from torchloom import ops
from torchloom.graph import PassContext, args_of, call, find, replace

aten = torch.ops.aten


def dedupe_gathers(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Merge gathers, copies and reductions of the same parameter; return how many went away."""
    num_merged = 0
    for op in (ops.gather, ops.replicate):
        first: dict[tuple[object, ...], fx.Node] = {}
        for node in find(gm.graph, op):
            key = tuple(map(_hashable, args_of(node)))
            if key in first:
                replace(node, first[key])
                num_merged += 1
            else:
                first[key] = node
    return num_merged + sum(_merge_sum(gm.graph, op) for op in (ops.reduce, ops.sync))


def _merge_sum(graph: fx.Graph, op: object) -> int:
    """Turn `op(a) + op(b)` into `op(a + b)` for gradients of one parameter."""
    num_merged = 0
    for node in find(graph, aten.add.Tensor):
        left, right = args_of(node)[:2]
        if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)) or node.kwargs:
            continue
        is_pair = (
            left.target is op and right.target is op and args_of(left)[1:] == args_of(right)[1:]
        )
        if not is_pair or len(left.users) > 1 or len(right.users) > 1:
            continue
        with graph.inserting_before(node):
            total = call(graph, aten.add.Tensor, (args_of(left)[0], args_of(right)[0]))
            merged = call(graph, op, (total, *args_of(left)[1:]))
        replace(node, merged)
        graph.erase_node(left)
        graph.erase_node(right)
        num_merged += 1
    return num_merged


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
