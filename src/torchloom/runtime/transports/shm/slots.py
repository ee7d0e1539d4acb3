"""Which elements of which tensor go into which slotful: pure arithmetic, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchloom.runtime.transports.shm.arena import ALIGNMENT


class SlotPart(NamedTuple):
    """Elements `start` to `stop` of one tensor, and where in the slot they go."""

    index: int
    start: int
    stop: int
    offset_bytes: int


def plan_parts(
    numels: Sequence[int], item_bytes: Sequence[int], capacity_bytes: int
) -> list[list[SlotPart]]:
    """Divide flat tensors into slotfuls, in order.

    Args:
        numels: elements of each tensor.
        item_bytes: bytes of one element of each.
        capacity_bytes: room of one slot; a multiple of `ALIGNMENT`.

    Example:
        >>> plan_parts([3, 40], [4, 4], 128)
        [[Part(index=0, start=0, stop=3, offset_bytes=0), Part(index=1, start=0, stop=16, offset_bytes=64)], [Part(index=1, start=16, stop=40, offset_bytes=0)]]
    """
    slotfuls: list[list[SlotPart]] = [[]]
    used = 0
    for index, (numel, size) in enumerate(zip(numels, item_bytes, strict=True)):
        start = 0
        while start < numel:
            if used >= capacity_bytes:
                slotfuls.append([])
                used = 0
            stop = min(numel, start + (capacity_bytes - used) // size)
            slotfuls[-1].append(SlotPart(index, start, stop, used))
            used += -(-(stop - start) * size // ALIGNMENT) * ALIGNMENT
            start = stop
    return [parts for parts in slotfuls if parts]


def typed(slot: Tensor, offset_bytes: int, numel: int, dtype: torch.dtype) -> Tensor:
    """View a part of a slot of bytes as elements."""
    return slot[offset_bytes : offset_bytes + numel * dtype.itemsize].view(dtype)


def row(full: Tensor, rank: int, numel: int) -> Tensor:
    """The part of `full` that `rank` owns, without padding: possibly short, possibly empty."""
    return full.view(-1)[rank * numel : (rank + 1) * numel]
