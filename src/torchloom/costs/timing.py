"""Timing one operation: the median over repetitions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_MIN_REPEATS, _MAX_REPEATS = 5, 25
_ENOUGH_US = 200.0
"""A sample shorter than this repeats the operation inside of it: clocks and caches settle."""


def median_us(fn: Callable[[], object], device: torch.device, budget_s: float = 0.25) -> float:
    """Return the median time of a call in microseconds.

    Args:
        fn: a function without arguments.
        device: where it runs; a CUDA device is waited for.
        budget_s: seconds to spend, at least about five calls.
    """
    clock = _cuda_clock if device.type == "cuda" else _clock
    clock(fn, 1, device)  # the first call plans and allocates
    once_us = clock(fn, 1, device)
    inner = max(1, min(1000, int(_ENOUGH_US / max(once_us, 0.1))))
    spent_us = max(once_us * inner, 1.0)
    repeats = int(min(_MAX_REPEATS, max(_MIN_REPEATS, 1e6 * budget_s / spent_us)))
    return statistics.median(clock(fn, inner, device) / inner for _ in range(repeats))


def _clock(fn: Callable[[], object], repeats: int, device: torch.device) -> float:
    # A single thread's own clock stands still while other programs have its core.
    now = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    start = now()
    for _ in range(repeats):
        fn()
    return (now() - start) / 1e3


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
