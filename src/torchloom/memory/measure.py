"""What torch's allocator really did, the oracle that predictions are tested against; and how much memory this device has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from torchloom import envs


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
    with memory_profile() as profile:
        kept = fn()
    del kept
    live = peak = 0
    for num_bytes in allocations(profiler_events(profile)):
        live += num_bytes
        peak = max(peak, live)
    return Measured(peak, live)


@contextmanager
def memory_profile() -> Iterator[torch.profiler.profile]:
    """Profile allocations inside a `with` block.

    torch 2.13 tells the terminal of each start and stop of its profiler (Kineto's level "USDT", 5);
    nobody who plans has asked for that. A level that the environment names stands.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        envs.default_within("KINETO_LOG_LEVEL", "6"),
        # One cycle has no earlier events; without `acc_events` torch 2.11 warns that it drops them.
        torch.profiler.profile(
            activities=activities, profile_memory=True, acc_events=True
        ) as profile,
    ):
        yield profile


def profiler_events(profile: torch.profiler.profile) -> list[Any]:
    """Return the raw events of a profile that has ended: names, start_ns, duration_ns, nbytes."""
    profiler: Any = profile.profiler
    return list(profiler.kineto_results.events())


def allocations(events: list[Any]) -> list[int]:
    """Return the bytes of each allocation among the events of a profile, negative where they are freed, in order of time."""
    memory = [event for event in events if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]


def device_bytes(device: torch.device | None = None) -> int:
    """Return the memory of a device in bytes; the host's where there is no accelerator.

    Args:
        device: default: the current CUDA device, or the host.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
