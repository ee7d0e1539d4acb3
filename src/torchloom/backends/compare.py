"""Comparing two lists of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """How far results may differ; None means torch's default for the dtype."""

    rtol: float | None
    atol: float | None


class Mismatch(NamedTuple):
    """The first result that differs by more than the tolerance."""

    index: int
    text: str


def first_difference(
    actual: Sequence[Any], expected: Sequence[Any], tolerance: Tolerance
) -> Mismatch | None:
    """Return the first pair of results that differ, or None.

    Args:
        actual: results of the backend.
        expected: results of eager.
        tolerance: how far tensors may be apart; other results have to be equal.
    """
    if len(actual) != len(expected):
        return Mismatch(0, f"{len(actual)} results instead of {len(expected)}")
    for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
        text = _compare(left, right, tolerance)
        if text is not None:
            return Mismatch(index, text)
    return None


def _compare(left: Any, right: Any, tolerance: Tolerance) -> str | None:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        same_kind = isinstance(left, Tensor) == isinstance(right, Tensor)
        return None if same_kind and (left is right or left == right) else f"{left} != {right}"
    if left.shape != right.shape or left.dtype != right.dtype:
        return f"{left.dtype} {tuple(left.shape)} instead of {right.dtype} {tuple(right.shape)}"
    try:
        torch.testing.assert_close(
            left.detach(), right.detach(), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
        )
    except AssertionError:
        return _describe(left.detach(), right.detach())
    return None


def _describe(left: Tensor, right: Tensor) -> str:
    """Say how far two tensors of one shape are apart."""
    wide = torch.complex128 if left.is_complex() else torch.float64
    distance = (left.to(wide) - right.to(wide)).abs()
    # NaN on one side only counts as the largest difference.
    distance = distance.nan_to_num(nan=torch.inf)
    flat = int(distance.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), distance.shape))
    num_off = int((left != right).sum())
    got, want = left.reshape(-1)[flat].item(), right.reshape(-1)[flat].item()
    return (
        f"{num_off} of {left.numel()} elements differ; most at {list(place)}: {got:.6g}, eager "
        f"has {want:.6g}"
    )
