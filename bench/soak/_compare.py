"""Whether two runs came to the same, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def differences(left: Path, right: Path) -> list[str]:
    """Return what the ends of two runs differ in: weights, moments, schedule, generators.

    Args:
        left: folder of one run.
        right: folder of the other.
    """
    names = {path.name for folder in (left, right) for path in folder.glob("final-*.pt")}
    if not names:
        return ["neither run has come to its end"]
    found = []
    for name in sorted(names):
        if not ((left / name).exists() and (right / name).exists()):
            found.append(f"{name}: one of the runs has not come to its end")
            continue
        found += _differ(name, _read(left / name), _read(right / name))
    return found


def _read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def _differ(place: str, left: Any, right: Any) -> list[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return [f"{place}: other names"]
        return [each for key in left for each in _differ(f"{place} {key}", left[key], right[key])]
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return [] if _bits(left) == _bits(right) else [f"{place}: other bits"]
    return [] if left == right else [f"{place}: {left!r}, {right!r}"]


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    """Return all of a tensor; equal floats may be different bits, as 0.0 and -0.0 are."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()
