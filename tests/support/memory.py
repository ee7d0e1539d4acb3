"""What torch's allocator gives and takes: on a CPU, the device pool, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile


class Allocated(NamedTuple):
    """Bytes of torch's CPU allocator over one call."""

    kept: int
    """Allocated and not freed when the call returned."""
    peak: int
    """Most that was allocated at a time, beyond what was before."""
    result: Any


def measure(fn: Callable[[], Any]) -> Allocated:
    """Call `fn` and count what it allocates; host memory of the arena does not count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        result = fn()
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return Allocated(now, peak, result)
