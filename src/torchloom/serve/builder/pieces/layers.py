"""Which nodes of a graph belong together: operators that stay as they are, layers that repeat, and the rest."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from torchloom.graph.text import target_name
from torchloom.regions.find import find_regions, why_modes_leak

_LEAST_REPEATS = 2
_LEAST_LAYER = 8
"""Calls that a repeated part needs to be compiled by itself: less would only lose fusions."""
_ENTERS = re.compile(r"^_enter_|_increment_nesting$|_hooks_disable$")
_LEAVES = re.compile(r"^_exit_|_decrement_nesting$|_hooks_enable$")
_SETS = re.compile(r"^_?set_")


def groups_of(
    nodes: Sequence[fx.Node], kept: Collection[fx.Node], layers: bool
) -> list[tuple[Any, list[fx.Node]]]:
    """Return runs of nodes that belong together, in order.

    Args:
        nodes: the calls of a graph, in order.
        kept: of these, operators that stay as they are.
        layers: whether layers that repeat become groups.

    Returns:
        Each group with its key: equal ones for runs that are joined.
    """
    block_of = blocks_of(nodes)
    layer_of = _layers(nodes[0].graph) if layers and nodes else {}
    for block in set(block_of.values()):
        inside = {layer_of.get(each) for each in block}
        layer = inside.pop() if len(inside) == 1 else None
        layer_of |= dict.fromkeys(block, layer)
    found: list[tuple[Any, list[fx.Node]]] = []
    home: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        producer = node.args[0] if node.target is operator.getitem and node.args else None
        is_pick = isinstance(producer, fx.Node) and isinstance(
            producer.meta.get("example_value"), (tuple, list)
        )
        if is_pick and producer in home:
            home[producer].append(node)  # never hand a tuple from piece to piece
            home[node] = home[producer]
            continue
        key = ("kept", id(node)) if node in kept else ("layer", layer_of.get(node))
        if not found or found[-1][0] != key:
            found.append((key, []))
        found[-1][1].append(node)
        home[node] = found[-1][1]
    joined: list[tuple[Any, list[fx.Node]]] = []
    for key, group in found:
        is_layer = key[0] == "layer" and key[1] is not None and len(group) >= _LEAST_LAYER
        name = key if key[0] == "kept" or is_layer else "rest"
        if joined and name == "rest" and joined[-1][0] == "rest":
            joined[-1][1].extend(group)
        else:
            joined.append((name, list(group)))
    return joined


def _layers(graph: fx.Graph) -> dict[fx.Node, int | None]:
    """Return the number of the layer that a node is a part of, for nodes of layers that repeat."""
    # Only runs of modes matter: pieces are compared anew, and may return views of one another.
    found = find_regions(graph, _LEAST_REPEATS, why_not=why_modes_leak)
    parts = [part for group in found.groups for part in group]
    return {node: number for number, part in enumerate(parts) for node in part.nodes}


def blocks_of(nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return the nodes from where a transform, autocast or a mode is entered to where it is left, for each of them.

    What runs between is not what it would be alone, so a graph is not cut there.
    """
    names = {n: str(target_name(n.target)) for n in nodes if n.op == "call_function"}
    at_last = {
        node.target: node.args
        for node, name in names.items()
        if _SETS.search(name) and not node.all_input_nodes
    }
    now = dict(at_last)
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    depth = 0
    block: list[fx.Node] = []
    for node in nodes:
        name = names.get(node, "")
        depth += bool(_ENTERS.search(name)) - bool(_LEAVES.search(name))
        if node.target in at_last:
            now[node.target] = node.args
        is_open = depth > 0 or now != at_last
        if is_open or block:
            block.append(node)
        if block and not is_open:
            found |= dict.fromkeys(block, tuple(block))
            block = []
    return found | dict.fromkeys(block, tuple(block))
