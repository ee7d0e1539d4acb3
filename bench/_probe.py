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


class CoreProbe:
    """Times the same matrix products again and again; the operands fit in a core's own cache."""

    def __init__(self) -> None:
        self._left = torch.linspace(-1, 1, _SIZE * _SIZE).view(_SIZE, _SIZE)
        self._out = torch.empty_like(self._left)

    def measure(self) -> float:
        """Return the seconds that the work took on this core now."""
        start = time.perf_counter()
        for _ in range(_REPEATS):
            torch.mm(self._left, self._left, out=self._out)
        return time.perf_counter() - start
