"""How a joint graph will be divided: what runs forward, what runs backward, what is saved between.

A trial of the partitioner answers this, so a joint pass can act on what will really be kept instead
of guessing. The joint graph itself stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from torchloom._torch.partition import trial_partition


@dataclass(frozen=True)
class GraphSplit:
    """Nodes of a joint graph by where they will run; names, because graphs are copied."""

    forward: frozenset[str]
    """Computed in the forward graph."""
    backward: frozenset[str]
    """Computed in the backward graph: again, if they are in `forward` as well."""
    saved: frozenset[str]
    """Handed from one to the other, graph inputs included."""
    num_outputs: int
    """The first outputs of the joint graph are the forward's, the others are gradients."""


def split_of(joint: fx.GraphModule) -> GraphSplit | None:
    """Return how min-cut would divide a joint graph; None for a graph without a backward half."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    if not any(node.name.startswith("tangents") for node in placeholders):
        return None
    num_grads = sum(node.name.startswith("primals") for node in placeholders)
    num_outputs = len(outputs_of(joint.graph)) - num_grads
    return split_between(*trial_partition(joint, num_outputs), num_outputs)


def split_between(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> GraphSplit:
    """Return how two graphs divide the joint graph that they were made of.

    Args:
        forward: one of the two.
        backward: the other one.
        num_outputs: how many of the joint graph's outputs are forward's.
    """
    inputs = (node.name for node in backward.find_nodes(op="placeholder"))
    return GraphSplit(
        forward=_computed(forward),
        backward=_computed(backward),
        saved=frozenset(name for name in inputs if not name.startswith("tangents")),
        num_outputs=num_outputs,
    )


def _computed(graph: fx.Graph) -> frozenset[str]:
    return frozenset(node.name for node in graph.nodes if node.op == "call_function")


def outputs_of(graph: fx.Graph) -> list[Any]:
    """Return what a captured graph returns, a flat list of nodes and constants."""
    (values,) = graph.output_node().args
    assert isinstance(values, (list, tuple))
    return list(values)
