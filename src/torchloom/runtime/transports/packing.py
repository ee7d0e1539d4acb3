"""Small tensors travel together, large ones travel alone and uncopied.

A message has a fixed cost (about 0.1-0.3 ms over gloo on one host), a copy has a cost per byte.
Below `DIRECT_BYTES` the first outweighs the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Measured on gloo, 2 ranks of one host: a 256 KiB message costs about what its two copies cost.
DIRECT_BYTES = 256 << 10


class SplitBySize(NamedTuple):
    """Indices of the tensors that travel alone and of those that are packed."""

    direct: tuple[int, ...]
    packed: tuple[int, ...]


def split_by_size(tensors: Sequence[Tensor]) -> SplitBySize:
    """Divide tensors into those worth a message of their own and the rest.

    A single small tensor travels alone as well: packing it would only add copies.
    """
    return split_sizes([t.numel() * t.element_size() for t in tensors])


def split_sizes(sizes: Sequence[int]) -> SplitBySize:
    """Divide tensors of so many bytes as `split_by_size` does."""
    packed = [i for i, size in enumerate(sizes) if 0 < size < DIRECT_BYTES]
    if len(packed) == 1:
        packed = []
    chosen = set(packed)
    direct = tuple(i for i, size in enumerate(sizes) if i not in chosen and size)
    return SplitBySize(direct, tuple(packed))


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one dtype, end to end, into one flat tensor."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unpack(flat: Tensor, into: Sequence[Tensor]) -> None:
    """Copy the front of a flat tensor back out into contiguous tensors, end to end."""
    flats = [tensor.view(-1) for tensor in into]
    numels = [each.numel() for each in flats]
    torch._foreach_copy_(flats, flat[: sum(numels)].split(numels))


def unpack_rows(rows: Tensor, into: Sequence[Tensor]) -> None:
    """Copy the columns of a matrix back out into tensors that hold as many rows, end to end."""
    wholes = [tensor.view(len(rows), -1) for tensor in into]
    torch._foreach_copy_(wholes, rows.split([each.shape[1] for each in wholes], dim=1))
