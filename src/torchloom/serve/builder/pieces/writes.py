"""Which arguments an operator in a graph may write to."""

from __future__ import annotations

from typing import Any

from torch import fx

from torchloom._torch.operators import OpOverload, OpOverloadPacket
from torchloom.graph.text import target_name


def overloads_of(target: Any) -> list[OpOverload]:
    """Return the operator that a node calls, or all that a name like `torch.ops.mylib.attention` stands for."""
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target] if isinstance(target, OpOverload) else []


def may_write(node: fx.Node) -> bool:
    """Say whether a node may write to its arguments."""
    return bool(written_by(node))


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node may write to."""
    if node.op == "call_method":
        name = str(node.target)
        return _nodes(node.args[:1]) if name.endswith("_") and not name.endswith("__") else []
    if node.op != "call_function":
        return []
    if operators := overloads_of(node.target):
        written = {
            name
            for each in operators
            for place, argument in enumerate(each._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for name in (argument.name, place)
        }
        given = {**dict(enumerate(node.args)), **node.kwargs}
        return _nodes([value for name, value in given.items() if name in written])
    name = target_name(node.target)
    out = _nodes([node.kwargs.get("out")])
    is_in_place = name in ("setitem", "iadd", "isub", "imul", "itruediv") or name.endswith("_")
    if is_in_place or node.kwargs.get("inplace"):
        return [*out, *_nodes([*node.args[:1], node.kwargs.get("input")])]
    return out


def _nodes(values: Any) -> list[fx.Node]:
    """Return the nodes in nested arguments."""
    found: list[fx.Node] = []
    fx.map_arg(values, found.append)
    return found
