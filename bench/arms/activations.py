"""Torch's own ways to trade time for memory in one process: checkpointed blocks, its memory budget."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from arms.base import Job, Trainee, make_optimizer, make_step

_BACKENDS = {"inductor": "inductor", "boxed": "aot_eager_decomp_partition"}


_aten = torch.ops.aten
_KEPT = [
    _aten.mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
]
"""Operators whose results selective checkpointing keeps, as torchtitan's does: products and attention."""


class Checkpointed(nn.Module):
    """A block that keeps its inputs only, or with `selective` also `_KEPT`; backward runs the rest again."""

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        super().__init__()
        self.block = block
        contexts = partial(create_selective_checkpoint_contexts, _KEPT)
        self._options = {"context_fn": contexts} if selective else {}

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(self.block, *args, use_reentrant=False, **self._options)


def checkpoint_blocks(model: nn.Module, every: int, *, selective: bool = False) -> None:
    """Wrap each `every`-th block of the decoder, in place; 0 wraps none."""
    if every:
        for index in range(0, len(model.blocks), every):
            model.blocks[index] = Checkpointed(model.blocks[index], selective=selective)


def build(
    job: Job,
    *,
    route: Literal["inductor", "boxed", "eager"],
    budget: float | None = None,
    checkpoint_every: int = 0,
) -> Trainee:
    """Build one replica.

    Args:
        job: what to train.
        route: Inductor, the partitioned graphs run one operator at a time with arguments freed
            after their last use ("boxed"), or no compiler.
        budget: `torch._functorch.config.activation_memory_budget`, 0 to 1; None leaves it alone.
        checkpoint_every: see `checkpoint_blocks`.
    """
    model = job.model()
    checkpoint_blocks(model, checkpoint_every)
    optimizer = make_optimizer(model)
    if route == "eager":
        return Trainee(step=make_step(job, model, optimizer))
    if budget is not None:
        import_module("torch._functorch.config").activation_memory_budget = budget
    return Trainee(step=make_step(job, torch.compile(model, backend=_BACKENDS[route]), optimizer))
