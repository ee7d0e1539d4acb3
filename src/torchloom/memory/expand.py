"""A graph with the nodes of bodies in the place of their calls: what runs, one call after the other.

A body is one graph with one set of fake tensors, and several calls of it are alive at the same time. So
each copied node says which storages its values are in that call: an operand's and a result's are those of the
calling graph, all others are the call's own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from torchloom.graph import args_of, value_of
from torchloom.memory.storages import CALL_STORAGES, CallStorages
from torchloom.ops.regions import body_of, half_of_node, inputs_of, is_call_of_body


def expanded(graph: fx.Graph) -> fx.Graph:
    """Return a graph without calls of bodies, for simulations; it never runs.

    Args:
        graph: a lowered graph; returned itself if it calls no body.
    """
    if not any(is_call_of_body(node) for node in graph.nodes):
        return graph
    found = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    called: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_call_of_body(node):
            called[node] = _inlined(found, node, env)
        elif node.target is operator.getitem and node.args[0] in called:
            env[node] = called[node.args[0]][node.args[1]]
        else:
            env[node] = found.node_copy(node, lambda used: env[used])
    return found


def _inlined(graph: fx.Graph, call: fx.Node, env: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Append a body's nodes to a graph; return what the call returns."""
    half = half_of_node(call).graph_module.graph
    storages = CallStorages(f"{call.args[1]} {call.name}")
    operands = inputs_of(call)
    own: dict[fx.Node, fx.Node] = {}
    for inside, outside in zip(half.find_nodes(op="placeholder"), operands, strict=True):
        own[inside] = env[outside]
        storages.name_as(value_of(inside), env[outside])
    results: Any = half.output_node().args[0]
    for node, pick in zip(results, _picks(call, len(results)), strict=True):
        if pick is not None:
            storages.name_as(value_of(node), pick)
    name, number, *_ = args_of(call)
    modules = body_of(name).modules
    own_module = next(iter(modules.values()), "")
    for node in half.nodes:
        if node.op in ("placeholder", "output"):
            continue
        new = own[node] = graph.node_copy(node, lambda used: own[used])
        new.meta = {**node.meta, CALL_STORAGES: storages}
        for key in _STACKS:
            if key in node.meta:
                stack = node.meta[key]
                new.meta[key] = _in_module(stack, own_module, modules.get(number, own_module))
    return [own[node] for node in results]


_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


def _in_module(stack: Mapping[str, Any], own: str, called: str) -> dict[str, Any]:
    """Return the modules of a body's node with the module of a call in the place of the body's own."""
    return {
        key: (called + path.removeprefix(own), kind)
        if own and _is_part(path, own)
        else (path, kind)
        for key, (path, kind) in stack.items()
    }


def _is_part(path: str, module: str) -> bool:
    """Say whether a path is that of a module or of one inside of it."""
    return path == module or path.startswith(f"{module}.")


def _picks(call: fx.Node, num_results: int) -> list[fx.Node | None]:
    found: list[fx.Node | None] = [None] * num_results
    for user in call.users:
        index: Any = user.args[1]
        found[index] = user
    return found
