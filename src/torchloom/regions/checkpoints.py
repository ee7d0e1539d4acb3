"""Bring gathers out of the user's checkpoints, as out of any other part of a graph.

    before   checkpoint(body, x, shard)        body: w = gather(shard, 'layers.0.weight'); ...
    after    w = gather(shard, 'layers.0.weight')
             checkpoint(body', x, w)           body': equal for all layers

Stage 3 gathers weights again in backward whether a checkpoint holds them or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from torchloom._torch.bodies import CHECKPOINT
from torchloom.backends.graphs import copy_graph_module
from torchloom.regions.labels import PARAMETER_OPS, module_of_attr, traced_value


def hoist_gathers(gm: fx.GraphModule) -> None:
    """Move gathers out of checkpoints; policies that say what these keep have no say about weights.

    Args:
        gm: a copy of a captured graph; its checkpointed bodies are replaced, not changed.
    """
    for node, body, given in _checkpoints(gm):
        _hoist(gm, node, body, given)


def _hoist(
    gm: fx.GraphModule, node: fx.Node, body: fx.GraphModule, given: dict[fx.Node, Any]
) -> None:
    graph, inputs = body.graph, list(given)
    moved = [
        each
        for each in graph.nodes
        if each.target in PARAMETER_OPS and all(used in given for used in each.all_input_nodes)
    ]
    if not moved:
        return
    end = next(each for each in graph.nodes if each.op != "placeholder")
    for each in moved:
        with gm.graph.inserting_before(node):
            outside = gm.graph.node_copy(each, lambda used: given[used])
        with graph.inserting_before(end if end is not each else each):
            inside = graph.placeholder(f"{each.name}_given")
        inside.target = inside.name
        inside.meta = {"example_value": traced_value(each)}
        given[inside] = outside
        each.replace_all_uses_with(inside, propagate_meta=False)
        if each is end:
            end = each.next
        graph.erase_node(each)
    for each in inputs:
        if not each.users:
            del given[each]
            graph.erase_node(each)
    _replace_body(gm, node, body, given)


def _checkpoints(
    gm: fx.GraphModule,
) -> Iterator[tuple[fx.Node, fx.GraphModule, dict[fx.Node, Any]]]:
    """Yield each checkpoint of a graph, a copy of its body to edit, and what the inputs of that are given."""
    for node in list(gm.graph.find_nodes(op="call_function", target=CHECKPOINT)):
        body = module_of_attr(_attr(node))
        if isinstance(body, fx.GraphModule):
            copy = copy_graph_module(body)
            inputs = copy.graph.find_nodes(op="placeholder")
            yield node, copy, dict(zip(inputs, node.args[1:], strict=True))


def _replace_body(
    gm: fx.GraphModule, node: fx.Node, body: fx.GraphModule, given: Mapping[fx.Node, Any]
) -> None:
    """Let a checkpoint run another body, whose own name keeps it from those of other checkpoints.

    Args:
        gm: the graph's module; edited in place.
        node: the checkpoint.
        body: what it is to run.
        given: by the inputs of the body, in their order.
    """
    attr = _attr(node)
    name = f"{attr.target}_of_{node.name}".replace(".", "_")
    body.recompile()
    gm.add_module(name, body)
    with gm.graph.inserting_before(node):
        new_attr = gm.graph.get_attr(name)
    node.args = (new_attr, *given.values())
    if not attr.users:
        gm.graph.erase_node(attr)


def _attr(checkpoint: fx.Node) -> fx.Node:
    attr: Any = checkpoint.args[0]
    return attr
