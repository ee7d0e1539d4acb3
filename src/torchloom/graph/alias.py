"""Find nodes that share memory.

Two nodes share memory when an operator's schema says that one is a view of the other, or when their recorded
values have one storage: a reshape that copies nothing has, whatever its schema says. Neither is
enough alone, since passes replace nodes under views that were recorded before.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from torchloom._torch.operators import OpOverload
from torchloom.graph.nodes import value_of


def is_view_op(target: object) -> bool:
    """Say whether an operator returns views of an argument and writes nothing, by its schema."""
    return isinstance(target, OpOverload) and _returns_views(target)


@functools.cache
def _returns_views(op: OpOverload) -> bool:
    aliases = [argument.alias_info for argument in op._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases)


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node that this one is a view or a pick of, None for a value of its own.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> viewed(graph.call_function(torch.ops.aten.t.default, (x,))) is x
        True
    """
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    if node.target is operator.getitem or is_view_op(node.target):
        return node.all_input_nodes[0]  # schemas of views name what they view first
    return None


def is_view(node: fx.Node) -> bool:
    """Say whether a node makes no memory of its own: a view, or one of several results."""
    return viewed(node) is not None


def source_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory this one views; the node itself unless it is a view."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def storage_of(node: fx.Node) -> int | None:
    """Return an id of the storage behind a node's recorded tensor, None for anything else."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def owners(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for each node with a tensor, or without a recorded value, the first node that holds the same memory."""
    parent: dict[fx.Node, fx.Node] = {}
    by_storage: dict[int, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    order: dict[fx.Node, int] = {}
    for index, node in enumerate(graph.nodes):
        storage = storage_of(node)
        if storage is None and ("val" in node.meta or node.op == "output"):
            continue
        parent[node], order[node] = node, index
        same = node if storage is None else by_storage.setdefault(storage, node)
        for other in (_base(node), same):
            if other is not None and other in parent:
                first, second = sorted((root(other), root(node)), key=order.__getitem__)
                parent[second] = first
    return {node: root(node) for node in parent}


def is_alias(node: fx.Node, of: fx.Node) -> bool:
    """Say whether `node`, which reads `of`, shares its memory."""
    storage = storage_of(node)
    return _base(node) is of or (storage is not None and storage == storage_of(of))


def readers(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return all users of nodes and of what shares their memory, in no special order."""
    pending, found = list(nodes), dict[fx.Node, None]()
    for node in pending:  # grows while it is walked
        for user in node.users:
            if user not in found and is_alias(user, node):
                pending.append(user)
            found[user] = None
    return list(found)


def argument(node: fx.Node, index: int, name: str) -> Any:
    """Return an argument of a call of an operator, however it was passed; None for one that was not."""
    return node.args[index] if index < len(node.args) else node.kwargs.get(name)


def _base(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory a call returns: the one that it views, or writes and returns."""
    inputs = node.all_input_nodes
    if not node.op.startswith("call_") or not inputs:
        return None
    call, pick = node, 0
    if node.target is operator.getitem:
        call, pick = inputs[0], node.args[1]
        is_list = isinstance(value_of(call), (list, tuple)) or isinstance(call.target, OpOverload)
        if not is_list:
            return call
    elif not isinstance(node.target, OpOverload):
        return None if "val" in node.meta else inputs[0]
    if not isinstance(call.target, OpOverload):
        return None
    place = _aliased_argument(call.target, pick if isinstance(pick, int) else 0)
    given = None if place is None else argument(call, *place)
    return given if isinstance(given, fx.Node) else None


@functools.cache
def _aliased_argument(op: OpOverload, pick: int) -> tuple[int, str] | None:
    """Return the place of the argument whose memory one result of an operator has."""
    results = op._schema.returns
    alias = results[pick if len(results) > 1 else 0].alias_info if results else None
    if alias is None:
        return None
    for index, each in enumerate(op._schema.arguments):
        if each.alias_info is not None and each.alias_info.before_set & alias.before_set:
            return index, each.name
    return None
