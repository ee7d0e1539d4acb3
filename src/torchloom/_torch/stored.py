"""torch's own stored forms: of graphs, and of the bytecode that Dynamo writes."""

from __future__ import annotations

from typing import Any

from torch import fx

from torchloom._torch.shapes import new_shape_env


def graph_to_bytes(graph_module: fx.GraphModule) -> bytes:
    """Return a graph with its operators, tensors and symbols as bytes."""
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(graph_module, Options(ops_filter=None))


def graph_from_bytes(content: bytes) -> fx.GraphModule:
    """Return what `graph_to_bytes` stored; this runs its content."""
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler

    graph_module: Any = GraphPickler.loads(content, FakeTensorMode(shape_env=new_shape_env()))
    graph_module.recompile()
    return graph_module


def is_made_by_dynamo(target: object) -> bool:
    """Return whether a function of a graph was made by Dynamo for this process, such as those for NumPy's."""
    return type(target).__module__.startswith("torch._dynamo")
