"""Which tensors overlap in memory: compilers order reads and writes by it, so a program relies on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Span = tuple[str, int, int]
"""A device, and the addresses that begin and end a tensor's values there."""


def overlaps(tensors: Sequence[Tensor]) -> dict[int, tuple[int, int]]:
    """Return for tensors that share memory with an earlier one which that is, and how many bytes behind its start.

    Args:
        tensors: none of them twice.
    """
    spans = [(number, span) for number, each in enumerate(tensors) if (span := _span(each))]
    spans.sort(key=lambda item: item[1])
    found: dict[int, tuple[int, int]] = {}
    group: list[tuple[int, Span]] = []
    for number, (device, start, end) in spans:
        group = [(each, span) for each, span in group if span[0] == device and span[2] > start]
        for other, (_, begin, _) in group:
            late, early = max(number, other), min(number, other)
            if early < found.get(late, (late,))[0]:
                found[late] = (early, start - begin if late == number else begin - start)
        group.append((number, (device, start, end)))
    return found


def _span(tensor: Tensor) -> Span | None:
    """Return the addresses that a tensor's values lie between, None where it has none."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return None
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a tensor without memory, such as a fake one
        return None
    if not start:
        return None
    steps = sum((size - 1) * by for size, by in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), start, start + (steps + 1) * tensor.element_size()
