"""Batches of one shape on all ranks: unequal shapes would compile on one rank and not on another."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from torchloom.errors import DataError
from torchloom.runtime import get_communicator


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
