"""Reduce and pad small tensors over all ranks, in messages with names that ranks compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchloom._torch.untraced import leave_alone
from torchloom.errors import DataError
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


def pad_tensors(
    specs: Iterable[tuple[Tensor, int, float]], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Pad tensors so that each has the length of the longest rank's. All ranks must call; see docs/ragged.md.

    One collective finds the lengths. Every rank, the longest one too, gets a new contiguous tensor:
    with other strides than its peers a rank would compile alone.

    Args:
        specs: tensors on the device of the group's backend, each with the dim to pad and the value
            to pad with.
        group: the ranks; default: all.

    Returns:
        The padded tensors, in order.

    Raises:
        DataError: a tensor has no such dim.

    Example:
        >>> ids, mask = pad_tensors([(ids, 1, 0), (mask, 1, 0)])  # doctest: +SKIP
    """
    wanted = list(specs)
    for tensor, dim, _ in wanted:
        if not -tensor.dim() <= dim < tensor.dim():
            raise DataError(
                f"pad_tensors got dim {dim} for a tensor of shape {tuple(tensor.shape)}: give a "
                f"dim from 0 to {tensor.dim() - 1} (docs/ragged.md)"
            )
    if not wanted:
        return []
    lengths = torch.tensor(
        [tensor.shape[dim] for tensor, dim, _ in wanted], device=wanted[0][0].device
    )
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        world = group or dist.group.WORLD
        assert world is not None
        lengths = get_communicator(world).gather_small(lengths, "lengths to pad to").amax(dim=0)
    return [
        _padded(tensor, dim, value, length)
        for (tensor, dim, value), length in zip(wanted, lengths.tolist(), strict=True)
    ]


def _padded(tensor: Tensor, dim: int, value: float, length: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = length
    padded = tensor.new_full(shape, value)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded
