"""Which arguments a call in a graph may write, by an operator's schema or by the naming of torch's functions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from torchloom._torch.inductor import ops_made_in_place
from torchloom._torch.operators import OpOverload, OpOverloadPacket
from torchloom.graph.alias import argument, is_view
from torchloom.graph.nodes import value_of
from torchloom.graph.text import target_name

aten = torch.ops.aten

_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in dir(operator)
    if name.startswith("i") and name in operator.__all__ and hasattr(operator, name[1:])
) | {operator.setitem, operator.iand, operator.ior}
"""`iadd` and its like."""
_OF_NO_VALUES = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})
"""Methods that change a tensor, and none of its values."""


def overloads_of(target: Any) -> list[OpOverload]:
    """Return the operator that a node calls, or all that a name like `torch.ops.mylib.attention` stands for.

    Args:
        target: of a node.
    """
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target] if isinstance(target, OpOverload) else []


def _is_in_place_name(name: str) -> bool:
    """Say whether a function or method of this name writes its first argument.

    Args:
        name: such as "add_".
    """
    is_public = not name.startswith("_") or name.startswith("_foreach_")
    return name.endswith("_") and is_public and name not in _OF_NO_VALUES


def written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a call may write.

    Args:
        node: of any graph, captured or lowered.
    """
    if not node.op.startswith("call_"):
        return []
    if operators := overloads_of(node.target):
        places = {place for each in operators for place in _written_arguments(each)}
        return _nodes([argument(node, *place) for place in sorted(places)])
    name = target_name(node.target)
    if name == "triton_kernel_wrapper_mutation":
        return node.all_input_nodes
    given = [node.kwargs.get("out")]
    if node.target in _IN_PLACE or _is_in_place_name(name) or node.kwargs.get("inplace"):
        given += [*node.args[:1], node.kwargs.get("input")]
    return _nodes(given)


@functools.cache
def _written_arguments(op: OpOverload) -> frozenset[tuple[int, str]]:
    return frozenset(
        (index, each.name)
        for index, each in enumerate(op._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )


def _nodes(values: Any) -> list[fx.Node]:
    """Return the nodes in nested arguments."""
    found: list[fx.Node] = []
    fx.node.map_arg(values, found.append)
    return found


def is_only_read(value: fx.Node, beside: Collection[fx.Node] = ()) -> bool:
    """Say whether nothing returns a value or a view of it, or may write it, also once a compiler ran it in place.

    Args:
        value: a weight, say.
        beside: readers that do not count.
    """
    views = [value]
    for view in views:  # grows while it is walked
        for user in view.users:
            if user in beside:
                continue
            if is_view(user) or _only_views(user):
                views.append(user)
            elif (
                not isinstance(user.target, OpOverload)
                or user.target._schema.is_mutable
                or user.target in ops_made_in_place()
            ):
                return False
    return True


def _only_views(node: fx.Node) -> bool:
    """Say whether a node returns the memory of its input, though its schema does not say so."""
    if node.target is torch.ops.prims.convert_element_type.default:
        source = node.all_input_nodes[0]
        return value_of(source) is not None and value_of(source).dtype == node.args[1]
    return node.target is aten._unsafe_view.default
