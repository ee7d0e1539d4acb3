"""AOTAutograd with compilers of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


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
