"""Views that show all of a tensor, and what gives the tensor back from them.

Forward of a body returns the view as one of its results, and backward reads the tensor: memory that is handed over once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from torchloom.errors import RegionError
from torchloom.graph import args_of, call, value_of

aten = torch.ops.aten

SizeOf = Callable[[torch.SymInt], fx.Node]
_Undoing = Callable[[fx.Node], tuple[Any, ...] | None]
"""A view -> the operator that undoes it, and its arguments behind the tensor; None: nothing does."""


def _unpermuted(view: fx.Node) -> tuple[Any, ...]:
    dims = args_of(view)[1]
    order = [dim % len(dims) for dim in dims]
    return aten.permute.default, [order.index(dim) for dim in range(len(dims))]


def _reshaped(view: fx.Node) -> tuple[Any, ...]:
    return aten.view.default, list(value_of(args_of(view)[0]).shape)


def _whole(view: fx.Node) -> tuple[Any, ...] | None:
    """As a cache of a sliding window, which shows the last values: all of them while there are few."""
    given = view.all_input_nodes[0]
    offsets = {str(value_of(each).storage_offset()) for each in (view, given)}
    return (aten.alias.default,) if form_of(view) == form_of(given) and len(offsets) == 1 else None


_UNDOING: dict[Any, _Undoing] = {
    aten.permute.default: _unpermuted,
    aten.transpose.int: lambda view: (aten.transpose.int, *args_of(view)[1:]),
    aten.t.default: lambda view: (aten.t.default,),
    aten.unsqueeze.default: lambda view: (aten.squeeze.dim, args_of(view)[1]),
    aten.view.default: _reshaped,
    aten.slice.Tensor: _whole,
}
"""How views that show all of a tensor are undone."""


def is_undone(result: fx.Node, root: fx.Node) -> bool:
    """Say whether the views that lead from a value to a result can all be undone."""
    node = result
    while node is not root:
        undoing = _UNDOING.get(node.target)
        if undoing is None or undoing(node) is None:
            return False
        node = args_of(node)[0]
    return True


def undone(
    graph: fx.Graph, result: fx.Node, root: fx.Node, given: fx.Node, size_of: SizeOf
) -> fx.Node:
    """Return the value that a result is a view of, from the result.

    Args:
        graph: nodes are added at its insertion point.
        result: of another graph, where `is_undone` holds.
        root: the value that it is a view of.
        given: the result in this graph.
        size_of: returns what has a symbolic size in this graph.
    """
    node = result
    while node is not root:
        undoing = _UNDOING[node.target](node)
        assert undoing is not None
        op, *args = fx.node.map_aggregate(
            undoing, lambda each: size_of(each) if isinstance(each, torch.SymInt) else each
        )
        given = call(graph, op, (given, *args))
        node = args_of(node)[0]
        if form_of(given) != form_of(node):
            raise RegionError(f"its backward reads %{node.name}, of which it returns a view")
    return given


def form_of(node: fx.Node) -> object:
    """Return dtype, shape and strides of a node's value, or the number that it is."""
    value = value_of(node)
    if not isinstance(value, Tensor):
        return str(value)
    return value.dtype, str(list(value.shape)), str(list(value.stride()))
