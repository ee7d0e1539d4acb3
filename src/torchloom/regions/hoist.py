"""Bring gathers out of the user's checkpoints, as out of any other part of a graph.

    before   checkpoint(body, x, shard)        body: w = gather(shard, 'layers.0.weight'); ...
    after    w = gather(shard, 'layers.0.weight')
             checkpoint(body', x, w)           body': equal for all layers

Stage 3 gathers weights again in backward whether a checkpoint holds them or not.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from torchloom.regions.checkpoints import checkpointed, replace_body
from torchloom.regions.labels import PARAMETER_OPS, traced_value


def hoist_gathers(gm: fx.GraphModule) -> None:
    """Move gathers out of checkpoints; policies that say what these keep have no say about weights.

    Args:
        gm: a copy of a captured graph; its checkpointed bodies are replaced, not changed.
    """
    for node, body, given in checkpointed(gm):
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
    replace_body(gm, node, body, given)
