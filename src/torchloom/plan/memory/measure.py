"""What torch's allocator really did: the oracle that predictions are tested against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Measured(NamedTuple):
    """Bytes of allocator events while something ran, relative to its start."""

    peak_bytes: int
    end_bytes: int


def measure_peak(fn: Callable[[], Any]) -> Measured:
    """Run `fn` under the profiler and return its highest and last sum of allocated CPU bytes.

    Counts every request of every thread, in the order of their times.

    Example:
        >>> measure_peak(lambda: torch.ones(10).sum()).peak_bytes
        44
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        kept = fn()
    del kept
    live = peak = 0
    memory = [event for event in profiler_events(profile) if event.name() == "[memory]"]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return Measured(peak, live)


def profiler_events(profile: torch.profiler.profile) -> list[Any]:
    """Return the raw events of a profile that has ended: names, start_ns, duration_ns, nbytes."""
    profiler: Any = profile.profiler
    return list(profiler.kineto_results.events())
