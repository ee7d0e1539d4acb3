"""The global gradient norm over sharded and whole gradients: one collective of one number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchloom.runtime import Communicator


def global_norm(sharded: Sequence[Tensor], whole: Sequence[Tensor], comm: Communicator) -> Tensor:
    """Return the L2 norm over all gradients, equal on every rank.

    Args:
        sharded: gradients of which each rank of the shard group holds a different piece.
        whole: gradients that are equal on all ranks; counted once.
        comm: the communicator of the gradients.
    """
    square = _square(sharded)
    if comm.rank == 0:
        square = square + _square(whole)
    return comm.sum_(square, "sum for the gradient norm").sqrt()


def clip_(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: max_norm / (norm + 1e-6), at most 1.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale_(grads, factor)


def scale_(grads: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply gradients in place."""
    present = [grad for grad in grads if grad.numel()]
    if present and not (isinstance(factor, float) and factor == 1.0):
        torch._foreach_mul_(present, factor)


def _square(grads: Sequence[Tensor]) -> Tensor:
    present = [grad for grad in grads if grad.numel()]
    if not present:
        return torch.zeros((), dtype=torch.float32)
    norms = torch.stack(torch._foreach_norm(present))
    return norms.to(torch.float32).square().sum()
