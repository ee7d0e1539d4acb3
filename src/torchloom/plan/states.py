"""Optimizer states that may wait in host memory: how many stay, and what the others cost.

The step streams what waits: load a chunk, step it, store it. With two slots copies run beside the
step of other chunks; the rest of their time is added to the step. A byte that forward and backward
leave free at their peak keeps a byte of states, so it has a price, like a byte of activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torchloom.costs import Device
from torchloom.plan.frontier import Lane
from torchloom.plan.task import Beside

CHUNK_BYTES = 64 << 20
"""Bytes that a chunk may load; a larger parameter is a chunk of its own. A guess, several times what
a link needs to run at full speed."""
_ALIGN = 64


class Stay(NamedTuple):
    """What becomes of states."""

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
        largest_bytes: those of one parameter, at most.
        num_params: elements that the optimizer updates.
        step_bytes: device memory that is free in a step which keeps no states.
        num_slots: chunks that may be on the device at a time.
        piece_bytes: pieces of parameters that may wait on the host and then stream with the states.

    Example:
        >>> states = HostStates(
        ...     total_bytes=8000, largest_bytes=800, num_params=1000, step_bytes=10**6, num_slots=2
        ... )
        >>> states.stay(10**6).resident_bytes
        8000
        >>> states.stay(2000).resident_bytes
        2000
    """

    total_bytes: int
    largest_bytes: int
    num_params: int
    step_bytes: int
    num_slots: int = 2
    piece_bytes: int = 0

    def stay(self, free_bytes: int) -> Stay:
        """Choose how many states stay, and the chunks of the others.

        Args:
            free_bytes: what forward and backward leave free at their peak.
        """
        if self.total_bytes <= min(free_bytes, self.step_bytes):
            return Stay(self.total_bytes, CHUNK_BYTES, self.num_slots)
        num_slots = self.num_slots if self.step_bytes >= self.num_slots * self.largest_bytes else 1
        # Slots take a quarter: below that, what stays saves more time than larger chunks do.
        chunk_bytes = max(_ALIGN, min(CHUNK_BYTES, self.step_bytes // (4 * num_slots)))
        slots = num_slots * max(chunk_bytes, self.largest_bytes)
        resident_bytes = max(0, min(free_bytes, self.step_bytes - slots))
        return Stay(resident_bytes, chunk_bytes, num_slots)

    def added_us(self, free_bytes: int, device: Device, kept_bytes: int = 0) -> float:
        """Return what streaming adds to the optimizer's step, in microseconds.

        Args:
            free_bytes: what forward and backward leave free at their peak.
            device: whose links carry it.
            kept_bytes: pieces that stay on the device.
        """
        stay = self.stay(free_bytes)
        moved = self.total_bytes - stay.resident_bytes + max(0, self.piece_bytes - kept_bytes)
        if moved <= 0:
            return 0.0
        both = device.round_trip_us()
        if stay.num_slots < 2:  # load, step and store wait for each other
            return both * moved
        # The first load and the last store have no step to run beside.
        ends = both * min(moved, max(stay.chunk_bytes, self.largest_bytes))
        link_us = device.round_trip_us(at_once=True) * moved
        hidden = min(link_us, self._step_us(device))
        return max(ends, link_us - hidden + device.link_load * hidden)

    def lanes(self, device: Device) -> tuple[Lane, ...]:
        """Return the least that streaming can cost: what runs beside the step, and the rest."""
        rate = device.round_trip_us(at_once=True)
        hidden = min(float(self.total_bytes), self._step_us(device) / rate)
        return Lane(device.link_load * rate, hidden), Lane(rate, self.total_bytes - hidden)

    def _step_us(self, device: Device) -> float:
        return 1e6 * self.num_params / device.adamw_params_per_s


@dataclass(frozen=True, slots=True)
class StateCosts:
    """What room at the peak is worth to optimizer states, per run of the graphs.

    Args:
        states: what may wait on the host.
        device: whose links carry them.
        micro_steps: runs of the graphs between two steps of the optimizer.
        room_bytes: what the peaks of other graphs leave beside them; None for no bound.
    """

    states: HostStates
    device: Device
    micro_steps: int = 1
    room_bytes: int | None = None

    def us(self, free_bytes: int, beside: Beside) -> float:
        """Return what streaming adds to a run of the graphs.

        Args:
            free_bytes: what a plan leaves free at its peak.
            beside: what lives on beside it, also while other graphs run.
        """
        if self.room_bytes is not None:
            free_bytes = min(free_bytes, self.room_bytes - beside.num_bytes)
        kept_bytes = sum(beside.pieces.values())
        return self.states.added_us(max(0, free_bytes), self.device, kept_bytes) / self.micro_steps

    def lanes(self) -> tuple[Lane, ...]:
        """Return ways to make room for a bound: see `HostStates.lanes`."""
        return tuple(
            Lane(lane.price / self.micro_steps, lane.num_bytes)
            for lane in self.states.lanes(self.device)
        )
