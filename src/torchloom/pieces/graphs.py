"""Graphs that run as they are, as bytes."""

from __future__ import annotations

from torch import fx

from torchloom._torch.stored import graph_from_bytes as load_graph
from torchloom._torch.stored import graph_to_bytes, is_made_by_dynamo

__all__ = ["dump_graph", "load_graph"]


def dump_graph(graph_module: fx.GraphModule) -> bytes:
    """Return a graph of public operators as bytes.

    Raises:
        ValueError: it calls functions that Dynamo made while it traced, such as those for NumPy's.
    """
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and is_made_by_dynamo(node.target):
            raise ValueError(f"{node.target!r} exists in the process that traced it alone")
    for node in graph_module.graph.nodes:
        for name in ("nn_module_stack", "source_fn_stack", "example_value", "stack_trace"):
            node.meta.pop(name, None)
    return graph_to_bytes(graph_module)
