"""Code of graph modules: taking a boxed list of inputs, and made when it is called first."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

BoxedCodeGen = _BoxedCodeGen
"""Code generation for functions that take one list and empty it."""


def sketch(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return a graph module that makes its code when it is called first, if ever."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def sketching() -> AbstractContextManager[Any]:
    """Return a block in which torch's partitioners return sketches."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)
