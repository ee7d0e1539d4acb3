"""Timing one operation: medians over repetitions, several alternatives in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

_MIN_REPEATS, _MAX_REPEATS = 5, 25
_ENOUGH_US = 200.0
"""A sample shorter than this repeats the operation inside of it: clocks and caches settle."""


def median_us(fn: Callable[[], object], device: torch.device, budget_s: float = 0.25) -> float:
    """Return the median time of a call in microseconds, measured within about `budget_s` seconds."""
    return medians_us({"": fn}, device, budget_s)[""]


def medians_us(
    fns: Mapping[str, Callable[[], object]], device: torch.device, budget_s: float = 0.25
) -> dict[str, float]:
    """Return the median time of each function in microseconds.

    They run in turns, so that a machine that slows down slows all of them.

    Args:
        fns: functions without arguments, by name.
        device: where they run; a CUDA device is waited for.
        budget_s: seconds to spend on all of them together, at least about five calls of each.
    """
    clock = _cuda_clock if device.type == "cuda" else _clock
    inner, spent_us = {}, 0.0
    for name, fn in fns.items():
        clock(fn, 1, device)  # the first call plans and allocates
        once = clock(fn, 1, device)
        inner[name] = max(1, min(1000, int(_ENOUGH_US / max(once, 0.1))))
        spent_us += once * inner[name]
    repeats = int(min(_MAX_REPEATS, max(_MIN_REPEATS, 1e6 * budget_s / max(spent_us, 1.0))))
    samples: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(repeats):
        for name, fn in fns.items():
            samples[name].append(clock(fn, inner[name], device) / inner[name])
    return {name: statistics.median(found) for name, found in samples.items()}


def _clock(fn: Callable[[], object], repeats: int, device: torch.device) -> float:
    start = time.perf_counter_ns()
    for _ in range(repeats):
        fn()
    return (time.perf_counter_ns() - start) / 1e3


def _cuda_clock(fn: Callable[[], object], repeats: int, device: torch.device) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(repeats):
        fn()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
