"""Measure the parts of a step, if `wall_clock_breakdown` is set, and name them in traces of torch's profiler."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.profiler import record_function

from torchloom import events
from torchloom._torch.modes import is_profiling
from torchloom.loop.plan_check import PlanCheck


@dataclass
class Timers:
    """Adds up named stretches of time, and tells them to an open recorder. Off, it costs four checks.

    Under torch's profiler each stretch is an event of its trace: `torchloom.` and its name. On CUDA each stretch ends by waiting for the device, or it would measure only its launch.
    """

    enabled: bool
    device: torch.device
    check: PlanCheck
    """Measures some steps."""
    step: int = 0
    """The optimizer step that the stretches belong to."""
    _durations_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of a `with` block to `name`."""
        is_heard, is_profiled = events.is_heard(), is_profiling()
        meter = self.check.meter
        if not self.enabled and not is_heard and not is_profiled and meter is None:
            yield
            return
        started_at, started = time.time(), time.perf_counter()
        with (
            record_function(f"torchloom.{name}") if is_profiled else nullcontext(),
            nullcontext() if meter is None else meter.phase(name),
        ):
            yield
        if self.enabled and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        duration = time.perf_counter() - started
        if self.enabled:
            self._durations_s[name].append(duration)
        if is_heard:
            events.emit(
                events.PhaseRan(phase=name, step=self.step, start_s=started_at, duration_s=duration)
            )

    def report(self) -> str:
        """Return the mean of each stretch since the last report, in milliseconds, and start anew."""
        parts = [
            f", {name} {1e3 * statistics.mean(found):.1f} ms"
            for name, found in self._durations_s.items()
        ]
        self._durations_s.clear()
        return "".join(parts)
