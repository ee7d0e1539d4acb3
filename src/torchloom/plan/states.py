"""Optimizer states that may wait in host memory: how many stay, and what the others cost.

The step streams what waits: load a chunk, step it, store it. With two slots copies run beside the
step of other chunks; the rest of their time is added to the step. A byte that forward and backward
leave free at their peak keeps a byte of states, so it has a price, like a byte of activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torchloom.costs import Device
from torchloom.plan.frontier import MemorySource

CHUNK_BYTES = 64 << 20
"""Bytes that a chunk may load; a larger parameter is a chunk of its own. A guess, several times what
a link needs to run at full speed."""
_ALIGN = 64


class StatePlacement(NamedTuple):
    """How many optimizer states stay on the device, and in what chunks the others stream."""

    resident_bytes: int
    """Of states that stay on the device."""
    chunk_bytes: int
    """What a chunk of the others may hold."""
    num_slots: int
    """Chunks on the device at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStates:
    """The optimizer states of one rank that may wait on the host.

    Args:
        total_bytes: all of them.
        largest_bytes: those of one parameter, at most; all, if the optimizer needs all of them at once.
        num_params: elements that the optimizer updates.
        step_bytes: device memory that is free in a step which keeps no states.
        num_slots: chunks that may be on the device at a time.
        shard_bytes: shards of parameters that may wait on the host and then stream with the states.

    Example:
        >>> states = HostStates(
        ...     total_bytes=8000, largest_bytes=800, num_params=1000, step_bytes=10**6, num_slots=2
        ... )
        >>> states.place(10**6).resident_bytes
        8000
        >>> states.place(2000).resident_bytes
        2000
    """

    total_bytes: int
    largest_bytes: int
    num_params: int
    step_bytes: int
    num_slots: int = 2
    shard_bytes: int = 0

    def place(self, free_bytes: int) -> StatePlacement:
        """Choose how many states stay, and the chunks of the others.

        Args:
            free_bytes: what forward and backward leave free at their peak.
        """
        if self.total_bytes <= min(free_bytes, self.step_bytes):
            return StatePlacement(self.total_bytes, CHUNK_BYTES, self.num_slots)
        num_slots = self.num_slots if self.step_bytes >= self.num_slots * self.largest_bytes else 1
        # Slots take a quarter: below that, what stays saves more time than larger chunks do.
        chunk_bytes = max(_ALIGN, min(CHUNK_BYTES, self.step_bytes // (4 * num_slots)))
        slots_bytes = num_slots * max(chunk_bytes, self.largest_bytes)
        resident_bytes = max(0, min(free_bytes, self.step_bytes - slots_bytes))
        return StatePlacement(resident_bytes, chunk_bytes, num_slots)

    def added_us(self, free_bytes: int, device: Device, kept_bytes: int = 0) -> float:
        """Return what streaming adds to the optimizer's step, in microseconds.

        Args:
            free_bytes: what forward and backward leave free at their peak.
            device: whose links carry it.
            kept_bytes: shards that stay on the device.
        """
        placed = self.place(free_bytes)
        moved_bytes = self.total_bytes - placed.resident_bytes
        moved_bytes += max(0, self.shard_bytes - kept_bytes)
        if moved_bytes <= 0:
            return 0.0
        us_per_byte = device.round_trip_us()
        if placed.num_slots < 2:  # load, step and store wait for each other
            return us_per_byte * moved_bytes
        # The first load and the last store have no step to run beside.
        ends_us = us_per_byte * min(moved_bytes, max(placed.chunk_bytes, self.largest_bytes))
        link_us = device.round_trip_us(at_once=True) * moved_bytes
        hidden_us = min(link_us, self._step_us(device))
        return max(ends_us, link_us - hidden_us + device.link_load * hidden_us)

    def sources(self, device: Device) -> tuple[MemorySource, ...]:
        """Return the least that streaming can cost: what runs beside the step, and the rest."""
        us_per_byte = device.round_trip_us(at_once=True)
        hidden_bytes = min(float(self.total_bytes), self._step_us(device) / us_per_byte)
        return (
            MemorySource(device.link_load * us_per_byte, hidden_bytes),
            MemorySource(us_per_byte, self.total_bytes - hidden_bytes),
        )

    def _step_us(self, device: Device) -> float:
        return 1e6 * self.num_params / device.adamw_params_per_s
