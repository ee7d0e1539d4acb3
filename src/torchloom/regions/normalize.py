"""Rewrite a captured graph so that equal layers look equal and can be called.

Identity operators go, since a region must not return its own input. `to` and its like return their own tensor or a
copy, never a view; autograd records nothing of the first:

    before   h = x.to(torch.float32); pow(h); norm(h); add(x, ..)        x is of float32
    after    pow(x); norm(x); add(x, ..)

Numbers that are no sizes are computed where they are read, since calls of bodies take sizes alone:

    before   scale = T ** -0.5; a = h1 * scale; b = h2 * scale
    after    a = h1 * (T ** -0.5); b = h2 * (T ** -0.5)
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torchloom._torch.modes import storage_id
from torchloom.regions.labels import traced_value, value_text

_METHODS = frozenset(
    ["to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "cpu", "cuda"]
)


def drop_identities(graph: fx.Graph) -> None:
    """Let all that reads such a result read the tensor itself.

    Args:
        graph: a copy of one from Dynamo; edited in place.
    """
    for node in list(graph.nodes):
        if node.op != "call_method" or node.target not in _METHODS:
            continue
        given = node.args[0] if node.args else None
        if isinstance(given, fx.Node) and _is_same(traced_value(given), traced_value(node)):
            node.replace_all_uses_with(given, propagate_meta=False)
            graph.erase_node(node)


def _is_same(given: object, result: object) -> bool:
    if not isinstance(given, Tensor) or not isinstance(result, Tensor):
        return False
    storage = storage_id(given)
    return (
        storage is not None
        and storage == storage_id(result)
        and value_text(given) == value_text(result)
        and str(given.storage_offset()) == str(result.storage_offset())
    )


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
