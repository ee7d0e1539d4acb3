"""The global gradient norm over sharded and whole gradients: one collective of one number.

The norm also detects NaN and Inf: it sums over the gradients that each rank will step with, so a
gradient that is not finite on one rank makes the norm not finite on all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchloom.runtime import Communicator

WHAT = "sum for the gradient norm"
"""The name of the collective."""


def global_norm(
    sharded: Sequence[Tensor],
    whole: Sequence[Tensor],
    comm: Communicator,
    dtype: torch.dtype,
    order: float = 2.0,
) -> Tensor:
    """Return the norm over all gradients, equal on every rank.

    Args:
        sharded: gradients of which each rank of the shard group holds a different shard.
        whole: gradients that are equal on all ranks; counted once.
        comm: the communicator of the gradients.
        dtype: of the norm; squares of finite gradients above 1e19 overflow float32.
        order: positive; that of the norm, inf for the largest absolute value.
    """
    if order == math.inf:
        largest = _power([*sharded, *whole], comm, dtype, order)
        return -comm.least(-largest.view(1), "largest gradient")[0]
    return comm.sum_(_own_power(sharded, whole, comm, dtype, order), WHAT).pow(1 / order)


def norm_and_sums(
    sharded: Sequence[Tensor],
    whole: Sequence[Tensor],
    losses: Sequence[Tensor],
    tokens: float,
    comm: Communicator,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the norm, and what its collective carries beside it: losses and tokens of all ranks.

    Args:
        sharded: as for `global_norm`.
        whole: likewise.
        losses: this rank's, of one step; may be none.
        tokens: this rank's, of one step; NaN if not known.
        comm: the communicator of the gradients.
        dtype: as for `global_norm`.

    Returns:
        The norm; and the sum of all losses, the number of ranks that have any, and the sum of tokens.
    """
    square = _own_power(sharded, whole, comm, dtype)
    found = [each.reshape(1).to(square) for each in losses]
    loss = [torch.stack(found).sum(0)] if len(found) > 1 else found
    known = math.nan if math.isnan(tokens) else tokens  # one object, for the cache's sake
    numbers = _numbers((1.0, known) if loss else (0.0, 0.0, known), square.device)
    sums = comm.sum_(torch.cat([square.view(1), *loss, numbers]), WHAT)
    return sums[0].sqrt(), sums[1:]


@functools.lru_cache(maxsize=8)
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor; those of a step are mostly those of the step before."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


def _own_power(
    sharded: Sequence[Tensor],
    whole: Sequence[Tensor],
    comm: Communicator,
    dtype: torch.dtype,
    order: float = 2.0,
) -> Tensor:
    """Return this rank's part of the norm to the power of its order."""
    own = _power([*sharded, *whole] if comm.rank == 0 else sharded, comm, dtype, order)
    if comm.rank != 0 and whole:
        own = own + 0 * _power(whole, comm, dtype, order)  # counted by rank 0; NaN and Inf stay
    return own if _is_first_copy(comm) else 0 * own


def first_of_ranks(keys: Tensor, comm: Communicator) -> Tensor:
    """Return the least of all ranks' keys."""
    return comm.least(keys, "search for a gradient that is not finite")


def device_of(tensors: Sequence[Tensor], comm: Communicator) -> torch.device:
    """Return the device of a rank's tensors; without any, a device that the process group can use."""
    if tensors:
        return tensors[0].device
    if comm.world_size > 1 and dist.get_backend(comm.shard_group()) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def clip_(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: max_norm / (norm + 1e-6), at most 1.

    Args:
        grads: scaled in place.
        norm: the global norm.
        max_norm: what it may be at most.
    """
    scale_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def scale_(grads: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply gradients in place."""
    present = [grad for grad in grads if grad.numel()]
    if present and not (isinstance(factor, float) and factor == 1.0):
        torch._foreach_mul_(present, factor)


def _power(grads: Sequence[Tensor], comm: Communicator, dtype: torch.dtype, order: float) -> Tensor:
    present = [grad for grad in grads if grad.numel()]
    if not present:
        return torch.zeros((), dtype=dtype, device=device_of(grads, comm))
    # A norm of 16-bit gradients is taken in 32 bits; float64 is never narrowed.
    wide = torch.float64 if any(g.dtype == torch.float64 for g in present) else dtype
    norms = torch.stack(torch._foreach_norm(present, order, wide)).to(dtype)
    return norms.amax() if order == math.inf else norms.pow(order).sum()


def _is_first_copy(comm: Communicator) -> bool:
    return comm.replicate_group is None or comm.replicate_group.rank == 0
