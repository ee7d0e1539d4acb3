"""`torchloom.all_reduce`: a small tensor reduced over all ranks, with a name that ranks compare."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch import Tensor

from torchloom._torch.untraced import leave_alone
from torchloom.runtime import get_communicator


def all_reduce(
    tensor: Tensor, op: Literal["mean", "sum", "min", "max"] = "mean", *, name: str
) -> Tensor:
    """Reduce a small tensor, such as a loss or a metric, over all ranks of the default group.

    `torch.distributed.all_reduce` matches messages by their order: where one rank calls it and
    another one is at a different collective, they read each other's bytes or hang. This function
    sends `name` along, so ranks that differ get an error that names both collectives.

    Args:
        tensor: the value of this rank; equal shape and dtype on every rank. It is not changed.
        op: how values are combined, per element.
        name: what is reduced, such as "loss"; equal on every rank.

    Returns:
        A new tensor with the result, equal on every rank. Without a process group, or with one
        rank, it equals `tensor`.

    Raises:
        ValueError: `op` is none of the four.
        AgreementError: another rank is at a collective of another name.
        PeerLostError: another rank has ended, or did not come in time.

    Example:
        >>> import torch
        >>> all_reduce(torch.tensor(2.0), "max", name="step time")
        tensor(2.)
    """
    if op not in ("mean", "sum", "min", "max"):
        raise ValueError(f"op={op!r}: use 'mean', 'sum', 'min' or 'max'")
    flat = tensor.detach().clone().view(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    world = dist.group.WORLD if dist.is_available() else None
    if world is not None:
        comm = get_communicator(world)
        if op in ("mean", "sum"):
            comm.sum_(flat, name)
        else:
            flat = comm.least(flat, name) if op == "min" else -comm.least(-flat, name)
        if op == "mean":
            flat /= world.size()
    return flat.view(tensor.shape)


leave_alone(all_reduce, "it communicates")
