"""Refuse operators that take rows and return none, unless they read only real rows, or no values.

No choice of values shows what a reduction with a threshold does (`(x > 5).all()`). So reductions are found by sizes:
fewer sizes of the result grow with the number of rows than of the operands.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from torchloom.serve.builder.buckets.row_graph import (
    DEEPER,
    MIXES,
    UNKNOWN,
    VMAP,
    At,
    MixedError,
    Views,
    flat,
    live_in,
    name_of,
    subgraphs,
)

_NO_VALUES = frozenset(
    f"{start}{name}"
    for name in ("zeros", "ones", "full", "empty", "tensor", "empty_strided", "rand", "randn")
    for start in ("new_", "")
) | frozenset(
    {
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
        *("type_as", "view_as", "expand_as", "reshape_as", "to", "resize_as"),
        *("size", "dim", "numel", "stride", "is_contiguous", "storage_offset", "_assert_async"),
    }
)
"""Operators that read sizes, types and devices of a tensor, and of its values those of the first alone."""


def refuse_reductions(module: fx.GraphModule, views: Views, ends: tuple[int, int]) -> None:
    """Raise for an operator that takes rows, and returns fewer sizes that grow with them.

    Args:
        module: a graph, or one inside of it.
        views: what its tensors look like for a number of rows.
        ends: the least and the greatest number of rows.

    Raises:
        MixedError: there is one; names it.
    """
    low, high = (views.at(module, rows) for rows in ends)
    live, depth = live_in(module.graph), 0
    for node in module.graph.nodes:
        depth += DEEPER.get(name_of(node), 0)
        if depth and name_of(node) not in VMAP and _num_varying(low.get(node), high.get(node)):
            raise MixedError(node, "sees all rows inside of vmap, where it cannot be tried")
        if node not in live or not node.op.startswith("call"):
            continue
        for inner in subgraphs(node, module):
            refuse_reductions(inner, views, ends)
        if node not in high:
            known = node.target is operator.setitem
            pairs = [(low.get(node.args[0]), high.get(node.args[0]))] if known else []
        else:
            pairs = [(low[node], high[node])]
        before = max(
            (_num_varying(low.get(each), high.get(each)) for each in node.all_input_nodes),
            default=0,
        )
        if not before:
            continue
        for one, other in pairs:
            if any(each is UNKNOWN for each in flat(other)):
                raise MixedError(node, "returns a size that follows from values")
            after = [_num_varying(*each) for each in zip(flat(one), flat(other), strict=True)]
            if min(after, default=before) < before and not _reads_real_rows(node, low, high):
                raise MixedError(node, MIXES)


def _num_varying(one: Any, other: Any) -> int:
    """Return how many sizes of a tensor differ between two numbers of rows; the most of several tensors."""
    pairs = zip(flat(one), flat(other), strict=True)
    return max(
        (
            sum(a != b for a, b in zip(low.shape, high.shape, strict=True))
            if isinstance(low, Tensor)
            else 1
            for low, high in pairs
        ),
        default=0,
    )


def _reads_real_rows(node: fx.Node, low: At, high: At) -> bool:
    """Say whether an operator reads rows that are there for each number of them, or no values."""
    name = name_of(node)
    if name == "_add_batch_dim":
        return True  # nothing inside of it sees another row
    first = node.args[0] if node.args else None
    one, other = (at.get(first) if isinstance(first, fx.Node) else None for at in (low, high))
    if name in _NO_VALUES:
        # `x.to(other)`: what is kept is the first.
        is_made = name.endswith("_like") or name.startswith("new_")
        return is_made or not _num_varying(one, other)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    index = _index_of(node, name, one.dim()) if len(set(node.all_input_nodes)) == 1 else None
    return index is not None and _is_within(index, one.shape, other.shape)


def _index_of(node: fx.Node, name: str, num_dims: int) -> tuple[Any, ...] | None:
    """Return what an operator takes of a tensor, as an index; None if it is no such operator."""
    match name, node.args:
        case "getitem", (_, tuple(index)):
            return index
        case "getitem", (_, index):
            return (index,)
        case "select", (_, int(at), int(start)):
            item: Any = start
        case "narrow", (_, int(at), int(start), int(length)) if start >= 0:
            item = slice(start, start + length)
        case _:
            return None
    items: list[Any] = [slice(None)] * num_dims
    items[at] = item
    return tuple(items)


def _is_within(index: tuple[Any, ...], low: Sequence[int], high: Sequence[int]) -> bool:
    """Say whether an index reads the same rows of both shapes."""
    items = list(index)
    used = sum(each is not None and each is not Ellipsis for each in items)
    if Ellipsis in [each for each in items if not isinstance(each, fx.Node)]:
        place = items.index(Ellipsis)
        items[place : place + 1] = [slice(None)] * (len(low) - used)
    dim = 0
    for each in items:
        if each is None:
            continue
        if low[dim] != high[dim] and not _is_low(each, low[dim]):
            return False
        dim += 1
    return True


def _is_low(item: Any, least: int) -> bool:
    if item == slice(None):
        return True
    if isinstance(item, slice):
        numbers = (item.start or 0, item.stop)
        is_forward = item.step is None or (isinstance(item.step, int) and item.step > 0)
        return is_forward and all(type(n) is int and 0 <= n <= least for n in numbers)
    return type(item) is int and 0 <= item < least
