"""Compute numbers that are no sizes where they are read: calls of bodies take sizes alone.

before   scale = T ** -0.5; a = h1 * scale; b = h2 * scale
after    a = h1 * (T ** -0.5); b = h2 * (T ** -0.5)
"""

from __future__ import annotations

import torch
from torch import fx

from torchloom.regions.labels import traced_value

_NUMBERS = (float, bool, torch.SymFloat, torch.SymBool)
_SIZES = (int, torch.SymInt, torch.Size)


def compute_where_read(graph: fx.Graph) -> None:
    """Give each reader of such a number its own, and leave out numbers and sizes that nobody reads.

    Where Dynamo has found a size to be one number, its readers hold that number: what computed it, which stands in the
    first layer alone, stays behind.

    Args:
        graph: a copy of one from Dynamo; edited in place.
    """
    for node in reversed(list(graph.nodes)):
        if _is_number(node, _NUMBERS):
            for user in list(node.users):
                with graph.inserting_before(user):
                    user.replace_input_with(node, graph.node_copy(node))
        is_size = node.op == "call_method" and node.target == "size"
        if not node.users and (is_size or _is_number(node, (*_NUMBERS, *_SIZES))):
            graph.erase_node(node)


def _is_number(node: fx.Node, kinds: tuple[type, ...]) -> bool:
    """Say whether a node computes such a number from numbers, which is the same wherever it is done."""
    if node.op != "call_function" or not isinstance(traced_value(node), kinds):
        return False
    given = [traced_value(each) for each in node.all_input_nodes]
    return all(isinstance(each, (*_NUMBERS, *_SIZES)) for each in given)
