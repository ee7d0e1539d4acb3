"""Free saved activations after their last use in backward.

    before   backward(x, ...)   ... last use of x ..................... return
    after    backward(x, ...)   ... last use of x, free_([x]) ......... return

For backends that hold their arguments until they return; Inductor and torchloom's own runner do not.
`free_activation` marks the saved values that share no memory with an input or a result of the model, and
`free_saved` frees those of at least `min_bytes`, except under `retain_graph`. Changes no values.
"""

from __future__ import annotations

import torch
from torch import fx

from torchloom import ops
from torchloom.graph import (
    PassContext,
    call,
    nbytes,
    owners,
    positions,
    readers,
    storage_of,
    value_of,
)

_MARK = "torchloom_may_free"


def free_activation(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Mark what backward may free; return how many values."""
    graph = gm.graph
    owner = owners(graph)
    ends = [*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes]
    fixed = {owner[node] for node in ends if node in owner}
    num_marked = 0
    for node, root in owner.items():
        if root not in fixed and root.op == "call_function" and not _is_ours(root):
            node.meta[_MARK] = True
            num_marked += 1
    return num_marked


def free_saved(
    gm: fx.GraphModule,
    ctx: PassContext,
    *,
    min_bytes: int = 10 << 20,
    keeps_inputs: bool = False,
) -> int:
    """Free marked inputs of a backward graph after their last use; return how many.

    Args:
        gm: a lowered graph; edited in place where it is the backward one.
        ctx: tells whether it is.
        min_bytes: smaller saved activations are left to the backend.
        keeps_inputs: whether the backend's code holds its inputs until it returns.
    """
    if not (ctx.is_backward and keeps_inputs):
        return 0
    graph = gm.graph
    groups: dict[int, list[fx.Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        storage = storage_of(node)
        if storage is not None:
            groups.setdefault(storage, []).append(node)
    where = positions(graph)
    dying: dict[fx.Node, list[fx.Node]] = {}
    for nodes in groups.values():
        users = readers(nodes)
        if not all(node.meta.get(_MARK) for node in nodes) or graph.output_node() in users:
            continue
        if _storage_bytes(nodes[0]) >= min_bytes and users:
            last = max(users, key=where.__getitem__)
            dying.setdefault(last, []).append(nodes[0])
    for last, nodes in dying.items():
        with graph.inserting_after(last):
            call(graph, ops.free_, (nodes,))
    return sum(map(len, dying.values()))


def _storage_bytes(node: fx.Node) -> int:
    """Return the bytes that freeing a value frees: those of the tensor that it views."""
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    size = value.untyped_storage().nbytes()
    return size if isinstance(size, int) else nbytes(node)


def _is_ours(node: fx.Node) -> bool:
    """Say whether torchloom made a value: transfers manage their memory themselves."""
    return getattr(node.target, "namespace", "") == "torchloom"
