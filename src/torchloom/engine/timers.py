"""Where a step's time goes, when `wall_clock_breakdown` asks for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Timers:
    """Adds up named stretches of time. Off, it costs one check per stretch.

    On CUDA each stretch ends by waiting for the device, or it would measure only its launch.
    """

    enabled: bool
    device: torch.device
    _total_s: dict[str, float] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of a `with` block to `name`."""
        if not self.enabled:
            yield
            return
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._total_s[name] = self._total_s.get(name, 0.0) + time.perf_counter() - started
        self._count[name] = self._count.get(name, 0) + 1

    def report(self) -> str:
        """Return the mean of each stretch since the last report, in milliseconds, and start anew."""
        parts = [
            f", {name} {1e3 * total / self._count[name]:.1f} ms"
            for name, total in self._total_s.items()
        ]
        self._total_s.clear()
        self._count.clear()
        return "".join(parts)
