"""Which values of a joint graph may leave the device between forward and backward."""

from __future__ import annotations

from torch import fx

from torchloom.graph.alias import owners
from torchloom.graph.nodes import value_of


def movable(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return each node whose memory may be moved, with the node that owns that memory.

    The owner is what moves: a view that is kept keeps all that it views. Not movable are other than
    floating-point tensors, symbolic and empty shapes, results of torchloom's own operators, and
    whatever shares memory with a graph input or output: parameters, the loss.
    """
    owner = owners(graph)
    ends = [*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes]
    fixed = {owner[node] for node in ends if node in owner}
    plain = {node: node not in fixed and _is_plain(node) for node in set(owner.values())}
    return {node: root for node, root in owner.items() if plain[root]}


def _is_plain(node: fx.Node) -> bool:
    """Say whether a node is a floating-point tensor of known shape that fills its storage."""
    value = value_of(node)
    is_ours = getattr(node.target, "namespace", "") == "torchloom"
    if node.op != "call_function" or is_ours or value is None or not value.is_floating_point():
        return False
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(isinstance(size, int) for size in sizes) or value.numel() == 0:
        return False
    return value.untyped_storage().nbytes() == value.numel() * value.element_size()
