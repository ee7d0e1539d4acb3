"""Comparisons that calls make of arguments: values that are equal in kind, tensors that share no memory."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), range),
    *(torch.device, torch.dtype, torch.layout, torch.memory_format),
)
_HOLD = (list, tuple, dict, set, frozenset)


def is_plain(value: Any) -> bool:
    """Return whether a value is a number or text, or holds nothing but such."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is slice:
        return is_plain((value.start, value.stop, value.step))
    if kind is dict:
        return all(is_plain(key) and is_plain(each) for key, each in value.items())
    return kind in _HOLD and all(map(is_plain, value))


def same(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal, types and signs of zeros included: 1 is neither 1.0 nor True.

    Example:
        >>> same([1, (2,)], [1, (2,)]), same([1], [True]), same(0.0, -0.0)
        (True, False, False)
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)  # which tells zeros apart, and no number from itself
    if isinstance(one, slice):
        one, other = (one.start, one.stop, one.step), (other.start, other.stop, other.step)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (set, frozenset)):
        return one == other and {type(each) for each in one} == {type(each) for each in other}
    return bool(one == other)


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
