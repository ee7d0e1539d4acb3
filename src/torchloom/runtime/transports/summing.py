"""Sums over ranks: always in the order of the ranks, so that no result depends on timing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def sum_into(out: Tensor, parts: Sequence[Tensor], scale: float) -> None:
    """Write the scaled sum over ranks 0, 1, ... into `out`; padding becomes zero.

    Args:
        out: flat; the sum is taken in its dtype.
        parts: one flat tensor per rank, as long as `out` or shorter by its padding.
        scale: factor on the sum.
    """
    valid = out[: parts[0].numel()]
    if len(parts) == 1:
        valid.copy_(parts[0])
    else:
        torch.add(parts[0].to(out.dtype), parts[1].to(out.dtype), out=valid)
    for part in parts[2:]:
        valid.add_(part)
    if scale != 1.0:
        valid.mul_(scale)
    out[valid.numel() :].zero_()


def scales_early(full: Tensor, shard: Tensor, scale: float) -> bool:
    """Say whether the addends of a shard are scaled instead of their sum, by every transport.

    A power of two changes no significand, so the rounded sums are the same; only those so small that
    they are subnormal (below 1.2e-38 in fp32) may differ in their last bit from a scaled sum. fp16
    has too few exponents for that.

    Args:
        full: of the dtype in which slices travel.
        shard: where the sum ends up.
        scale: what the sum is multiplied by.
    """
    wide = full.dtype in (torch.float32, torch.float64)
    return wide and full.dtype == shard.dtype and math.frexp(scale)[0] == 0.5


def sum_scaled_into(out: Tensor, parts: Sequence[Tensor], own: int, scale: float) -> None:
    """Write the scaled sum over ranks 0, 1, ... into `out`, where all but one part come scaled.

    Args:
        out: flat.
        parts: one flat tensor per rank, at least two, of the dtype of `out` and as long or shorter
            by its padding, which becomes zero.
        own: which part is not scaled yet.
        scale: factor on it, for which `scales_early` holds.
    """
    valid = out[: parts[0].numel()]
    first, second = (1, 0) if own == 0 else (0, 1)
    torch.add(parts[first], parts[second], alpha=scale if second == own else 1, out=valid)
    for rank, part in enumerate(parts[2:], start=2):
        valid.add_(part, alpha=scale if rank == own else 1)
    out[valid.numel() :].zero_()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which whole tensors are summed: 16 bits in fp32, rounded once."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def scale_all(tensors: Sequence[Tensor], scale: float) -> None:
    """Multiply tensors in place."""
    for tensor in tensors:
        tensor.mul_(scale)


def sum_bytes(dtype: torch.dtype, size: int) -> int:
    """Return the bytes that `sum_in_place` holds for one element.

    Args:
        dtype: of the addends.
        size: how many addends.
    """
    total = sum_dtype(dtype)
    if total != dtype:
        return 3 * total.itemsize  # the sum, and its first two addends
    return 0 if size == 2 else total.itemsize


def sum_in_place(own: Tensor, inbox: Sequence[Tensor], scale: float) -> None:
    """Replace one of the addends by the scaled sum, taken in rank order.

    Args:
        own: the addend of this rank, and where the sum ends up.
        inbox: all addends by rank, `own` among them.
        scale: what the sum is multiplied by.
    """
    if sum_dtype(own.dtype) == own.dtype and len(inbox) == 2:
        torch.add(inbox[0], inbox[1], out=own)
    else:
        total = torch.empty_like(own, dtype=sum_dtype(own.dtype))
        sum_into(total, inbox, 1.0)
        own.copy_(total)
    own.mul_(scale)


def sum_rows(target: Tensor, inbox: Sequence[Tensor], rank: int, scale: float) -> None:
    """Sum what arrived and this rank's own row; with the arithmetic of shared memory.

    Args:
        target: where the scaled sum ends up, in a dtype of its own.
        inbox: all addends by rank; those of other ranks may be overwritten.
        rank: this one.
        scale: what the sum is multiplied by.
    """
    if len(inbox) == 1 or not scales_early(inbox[rank], target, scale):
        sum_into(target, inbox, scale)
        return
    for peer, part in enumerate(inbox):
        if peer != rank:
            part.mul_(scale)
    sum_scaled_into(target, inbox, rank, scale)
