"""Leave out what returns the tensor that it is given: a part whose result it is would return one that it reads.

    before   h = x.to(torch.float32); pow(h); norm(h); add(x, ..)        x is of float32
    after    pow(x); norm(x); add(x, ..)

These methods return their own tensor or a copy, never a view; autograd records nothing of the first.
"""

from __future__ import annotations

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
