"""Copies of captured graphs: a compiler may rewrite the one that it is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchloom._torch.aot import sketch

_DYNAMO_ATTRS = ("compile_subgraph_reason", "_param_name_to_source", "_backend_id")
"""Attributes that Dynamo sets on a graph module for its compilers (2.11-2.15)."""
_SOURCE = "_dynamo_source"


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a module with its own graph, over the same parameters, buffers and metadata.

    Its Python code is generated when it is first called: compilers read the graph alone, and recompile it again and again.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        new.meta = dict(old.meta)
        if hasattr(old, _SOURCE):  # AOTAutograd asks inputs where they come from
            setattr(new, _SOURCE, getattr(old, _SOURCE))
    twin = sketch(gm, graph)
    twin.meta = dict(gm.meta)
    for name in _DYNAMO_ATTRS:
        if hasattr(gm, name):
            setattr(twin, name, getattr(gm, name))
    return twin


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the inputs of a graph."""
    return [value for value in values if isinstance(value, Tensor)]


def devices_of(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> set[str]:
    """Return the types of all devices on which a graph has inputs, parameters or buffers."""
    held = [*gm.parameters(), *gm.buffers()]
    return {tensor.device.type for tensor in [*tensors_of(example_inputs), *held]}


def name_of(backend: Any) -> str:
    """Return the name of a backend for messages."""
    if isinstance(backend, str):
        return backend
    named = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return named or type(backend).__name__


def clone_inputs(values: Sequence[Any]) -> list[Any]:
    """Return inputs that a graph may change in place, with gradients of their own.

    Inputs that share memory get separate copies.
    """
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            with torch.no_grad():
                twin = value.detach().clone(memory_format=torch.preserve_format)
            value = twin.requires_grad_(value.requires_grad)
        found.append(value)
    return found
