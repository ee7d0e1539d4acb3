"""Comparisons that calls make of tensors' memory: whether they share any, and whether their strides are plain."""

from __future__ import annotations

import itertools

from torch import Tensor


def apart(*tensors: Tensor) -> bool:
    """Return whether no two of these contiguous tensors share memory."""
    spans = sorted(
        (start := each.data_ptr(), start + each.nbytes) for each in tensors if each.numel()
    )
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def is_plainly_laid(tensor: Tensor) -> bool:
    """Return whether the strides of a contiguous tensor are those of its sizes: those of sizes of 1 may be any.

    Example:
        >>> row = torch.zeros(100, 4)[5:6]
        >>> is_plainly_laid(row), is_plainly_laid(row.as_strided((1, 4), (7, 1)))
        (True, False)
    """
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True
