"""AOTAutograd with compilers of our own, and graph modules whose code takes a boxed list or is made when it is called first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen


def aot_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    partition: Callable[..., Any],
    inference: Callable[..., Any],
    backward_at_once: bool = False,
) -> Callable[..., Any]:
    """Run AOTAutograd over a Dynamo graph with compilers and a partitioner of our own.

    Args:
        gm: the graph.
        example_inputs: fake tensors and sizes, one for each placeholder.
        forward: compiles the forward graph.
        backward: compiles the backward graph.
        partition: splits the joint graph into these two.
        inference: compiles the graph of a call without gradients.
        backward_at_once: let a failure of the backward graph be that of the whole. With sizes that vary, torch
            otherwise tries that graph again at its first run.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=partition,
        inference_compiler=inference,
        keep_inference_input_mutations=True,  # as torch's own backends do: `param.data = ...` in forward needs it
    )
    eager = {"force_non_lazy_backward_lowering": True} if backward_at_once else {}
    with functorch_config.patch(eager):
        return backend(gm, list(example_inputs))


def boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with the calling convention of compiled graphs: one list."""
    from torch._functorch.aot_autograd import make_boxed_func

    return fn if getattr(fn, "_boxed_call", False) else make_boxed_func(fn)


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
