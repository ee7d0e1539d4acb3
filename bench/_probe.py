"""How fast a core is just now, which no clock of the kernel tells.

On a shared host the neighbour of a virtual core may be another machine's, on the same physical core:
while that one computes, ours runs at little more than half its speed, for tenths of a second or for
minutes, and nothing is reported as stolen. A fixed amount of work, timed before and after each step,
does show it.
"""

from __future__ import annotations

import time

import torch

_SIZE = 160
_REPEATS = 64
"""About 8 ms at 100 GFLOP/s: short beside a step, and long beside the clock's jitter."""
_ABOUT = 1.15


class CoreProbe:
    """Times the same matrix products again and again; the operands fit in a core's own cache."""

    def __init__(self) -> None:
        self._left = torch.linspace(-1, 1, _SIZE * _SIZE).view(_SIZE, _SIZE)
        self._out = torch.empty_like(self._left)
        self._best_s = float("inf")

    def measure(self) -> float:
        """Return the seconds that the work took on this core now."""
        start = time.perf_counter()
        for _ in range(_REPEATS):
            torch.mm(self._left, self._left, out=self._out)
        passed_s = time.perf_counter() - start
        self._best_s = min(self._best_s, passed_s)
        return passed_s

    def wait_for_full_speed(self, patience_s: float) -> None:
        """Return when the core is about as fast as it ever was here, or `patience_s` are over."""
        deadline = time.monotonic() + patience_s
        while self.measure() > _ABOUT * self._best_s and time.monotonic() < deadline:
            time.sleep(0.05)
