"""The bodies of the user's checkpoints in a captured graph: found, and replaced by others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from torchloom._torch.bodies import CHECKPOINT
from torchloom.backends.graphs import copy_graph_module
from torchloom.regions.labels import module_of_attr


def checkpointed(
    gm: fx.GraphModule,
) -> Iterator[tuple[fx.Node, fx.GraphModule, dict[fx.Node, Any]]]:
    """Yield each checkpoint of a graph, a copy of its body to edit, and what the inputs of that are given."""
    for node in list(gm.graph.find_nodes(op="call_function", target=CHECKPOINT)):
        body = module_of_attr(_attr(node))
        if isinstance(body, fx.GraphModule):
            copy = copy_graph_module(body)
            inputs = copy.graph.find_nodes(op="placeholder")
            yield node, copy, dict(zip(inputs, node.args[1:], strict=True))


def replace_body(
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
