"""Move the last nodes of an activation checkpoint behind it, where passes over captured graphs find them.

before   loss = checkpoint(body, x, w, y)[0]     body: h = norm(x); z = linear(h, w); cross_entropy(z, y)
after    h = checkpoint(body', x, w, y)[0]       z = linear(h, w); loss = cross_entropy(z, y)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchloom._torch.aot import copy_graph_module
from torchloom._torch.bodies import CHECKPOINT


def checkpoints_of(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the activation checkpoints of a graph as Dynamo captured it."""
    return list(gm.graph.find_nodes(op="call_function", target=CHECKPOINT))


def body_of(checkpoint: fx.Node) -> fx.GraphModule | None:
    """Return the graph that a checkpoint runs; None where it is none."""
    attr: Any = checkpoint.args[0]
    found = getattr(checkpoint.graph.owning_module, str(attr.target), None)
    return found if isinstance(found, fx.GraphModule) else None


def lift_tail(
    gm: fx.GraphModule, checkpoint: fx.Node, head_of: Callable[[fx.Graph], fx.Node | None]
) -> fx.Node | None:
    """Move a node of a checkpoint's body, and all that is computed of it, behind the checkpoint.

    Args:
        gm: edited in place; bodies are replaced, not changed.
        checkpoint: one of its nodes.
        head_of: finds the node in a body. What is made of its second argument in few steps, such as the weight that a shard
            is gathered to, is computed behind the checkpoint as well.

    Returns:
        The node as it is in the graph now; None: nothing was moved.
    """
    module, users = body_of(checkpoint), list(checkpoint.users)
    if module is None or any(each.target is not operator.getitem for each in users):
        return None
    body = copy_graph_module(module)
    graph = body.graph
    head = head_of(graph)
    outputs: Any = graph.output_node().args[0]
    if head is None or not all(isinstance(each, fx.Node) for each in outputs):
        return None
    moved = _weight_of(head)
    tail = {head}
    for node in graph.nodes:
        if node.op != "output" and not tail.isdisjoint(node.all_input_nodes):
            tail.add(node)
    moved |= tail
    inputs = dict(zip(graph.find_nodes(op="placeholder"), checkpoint.args[1:], strict=True))
    kept = [each for each in outputs if each not in tail]
    read = [n for each in graph.nodes if each in moved for n in each.all_input_nodes]
    more = dict.fromkeys(n for n in read if n not in moved and n not in inputs and n not in kept)
    if not all(isinstance(each.meta.get("example_value"), torch.Tensor) for each in (*kept, *more)):
        return None  # of sizes, say
    kept += more
    with gm.graph.inserting_before(checkpoint.next):
        found: dict[Any, Any] = dict(inputs)
        for place, each in enumerate(kept):
            found[each] = gm.graph.call_function(operator.getitem, (checkpoint, place))
            found[each].meta = dict(each.meta)
        for each in graph.nodes:
            if each in moved:
                found[each] = gm.graph.node_copy(each, found.__getitem__)
    for each in users:
        place: Any = each.args[1]
        each.replace_all_uses_with(found[outputs[place]])
        gm.graph.erase_node(each)
    graph.output_node().args = (tuple(kept),)
    for each in reversed(list(graph.nodes)):
        if each in moved and not each.users:
            graph.erase_node(each)
    _run(gm, checkpoint, body, kept)
    return found[head]


def _run(gm: fx.GraphModule, checkpoint: fx.Node, body: fx.GraphModule, kept: list[Any]) -> None:
    """Let a checkpoint run another body; without results it goes."""
    attr: Any = checkpoint.args[0]
    if kept:
        name = f"{attr.target}_of_{checkpoint.name}"
        body.recompile()
        gm.add_module(name, body)
        with gm.graph.inserting_before(checkpoint):
            checkpoint.args = (gm.graph.get_attr(name), *checkpoint.args[1:])
        checkpoint.meta["example_value"] = tuple(each.meta["example_value"] for each in kept)
    else:
        gm.graph.erase_node(checkpoint)
    if not attr.users:
        gm.graph.erase_node(attr)


_MOST_STEPS = 8


def _weight_of(head: fx.Node) -> set[fx.Node]:
    """Return the nodes that make the second argument of a node of a graph's inputs, if these are few."""
    found: set[fx.Node] = set()
    waiting = [each for each in head.all_input_nodes if each is not head.args[0]]
    while waiting:
        node = waiting.pop()
        if node.op != "placeholder" and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found if len(found) <= _MOST_STEPS and head.args[0] not in found else set()
