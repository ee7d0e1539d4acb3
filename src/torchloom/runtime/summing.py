"""Sums over ranks: always in the order of the ranks, so that no result depends on timing."""

from __future__ import annotations

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
