"""Equality of arguments that are no tensors: numbers, texts, and containers of these, types included."""

from __future__ import annotations

from typing import Any

import torch

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
