"""Views of a body's operands, taken inside of the body: one node there instead of one for each call.

    before   w = view(slice(flat, 0, 0, 12), [3, 4])     region('a1b2', 0, [x, w])
    after    region('a1b2-77c0', 0, [x, flat])           the body begins with the slice and the view

A gathered weight is a view of what the collective fills, so there are two such nodes for each weight and call.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import fx

from torchloom._torch.operators import OpOverload
from torchloom.backends.graphs import copy_graph_module
from torchloom.graph import args_of, is_view_op, value_of
from torchloom.ops.regions import CalledHalf, body_of, half_of_node, is_call_of_body

Chain = tuple[fx.Node, ...]
"""Views of a value, each of the one before."""


def view_inside(gm: fx.GraphModule) -> list[fx.Node]:
    """Let calls take what their operands are views of; return the calls.

    Args:
        gm: a lowered graph; edited in place.
    """
    calls = [node for node in gm.graph.nodes if is_call_of_body(node)]
    for node in calls:
        operands = args_of(node)[2]
        half = half_of_node(node)
        chains = [_chain(each) for each in operands]
        if not any(chains):
            continue
        roots = [
            chain[0].all_input_nodes[0] if chain else each
            for chain, each in zip(chains, operands, strict=True)
        ]
        name = f"{node.args[0]}-{_digest(chains, roots)}"
        variants, key = body_of(name).variants, f"{name} {half.kind}"
        if key not in variants:
            variants[key] = _variant(half, chains, roots)
        node.args = (name, node.args[1], roots, *node.args[3:])
    if calls:
        gm.graph.eliminate_dead_code()
    return calls


def _chain(node: fx.Node) -> Chain:
    """Return the views that lead to an operand, outermost value first, none if it is no view."""
    found: list[fx.Node] = []
    while _is_plain_view(node):
        found.append(node)
        node = node.all_input_nodes[0]
    return tuple(found[::-1])


def _is_plain_view(node: fx.Node) -> bool:
    """Say whether a node is a view of its first argument and reads nothing else; `resident` is no such view."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    if "as_strided" in str(node.target):  # it counts from the start of the storage
        return False
    return is_view_op(node.target) and node.all_input_nodes == [node.args[0]]


def _digest(chains: list[Chain], roots: list[fx.Node]) -> str:
    text = [
        [f"{each.target} {each.args[1:]} {dict(each.kwargs)}" for each in chain] for chain in chains
    ]
    values = [
        f"{value.dtype}{list(value.shape)}{list(value.stride())}" for value in map(value_of, roots)
    ]
    return hashlib.blake2b(f"{text} {values}".encode(), digest_size=4).hexdigest()


def _variant(half: CalledHalf, chains: list[Chain], roots: list[fx.Node]) -> fx.GraphModule:
    """Return a half that takes the roots."""
    made = copy_graph_module(half.graph_module)
    made.meta.clear()  # it is yet to be made ready for Inductor
    inputs = made.graph.find_nodes(op="placeholder")
    begin = inputs[-1].next
    for given, root, chain in zip(inputs[: len(roots)], roots, chains, strict=True):
        value, users = given, list(given.users)
        given.meta = {"val": value_of(root)}
        for link in chain:
            target: Any = link.target
            with made.graph.inserting_before(begin):
                value = made.graph.call_function(target, (value, *link.args[1:]), link.kwargs)
            value.meta = {"val": value_of(link)}
        for user in users:
            user.replace_input_with(given, value)
    made.recompile()
    return made
