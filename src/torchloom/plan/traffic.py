"""What the collectives of a step cost at least, whatever a plan decides: a part of the bound.

A collective takes `load` of its time from compute where it runs beside it, and all of it where
compute waits; its time is at least its bytes at the best rate of the network, however they are
bucketed. A weight is gathered for each run of the graphs or stays, which takes memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchloom.costs import CollectiveKind, CostTable, collective_us
from torchloom.plan.frontier import Lane

_SMALLEST = 1 << 12
"""Bytes: below this a message is all latency, and its rate no better than that of larger ones."""


class Gathered(NamedTuple):
    """A weight that a graph gathers."""

    num_bytes: int
    """Of the whole weight."""
    num_runs: int
    """How often a run of forward and backward gathers it at least."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a joint graph sends, whatever is decided about it."""

    world_size: int = 1
    gathers: Mapping[str, Gathered] = field(default_factory=dict)
    """By the names of parameters."""
    reductions: Mapping[CollectiveKind, int] = field(default_factory=dict)
    """Bytes by kind of collective."""
    in_flight_bytes: int = 0
    """What gathered weights may hold at a time where none stays: as much less may be needed at the
    peak where they do."""

    def bytes_of(self, name: str) -> int:
        """Return the bytes that a weight takes where it stays gathered; 0 where it is not gathered."""
        return self.gathers[name].num_bytes if name in self.gathers else 0

    def least_us(
        self, costs: CostTable, may_stay: Collection[str] = (), micro_steps: int = 1
    ) -> tuple[float, tuple[Lane, ...]]:
        """Return the least time when everything that may stay does, and what the others cost more.

        Args:
            costs: times of collectives.
            may_stay: parameters that may stay gathered from step to step.
            micro_steps: runs of the graphs per optimizer step: what stays is gathered once in it.
        """
        load = costs.network.load
        floor = load * sum(
            num_bytes * self._least_rate(kind, num_bytes, costs)
            for kind, num_bytes in self.reductions.items()
        )
        total = sum(each.num_bytes for each in self.gathers.values())
        rate = self._least_rate("all_gather", total, costs)
        lanes = []
        for name, (num_bytes, num_runs) in self.gathers.items():
            sent_us = load * rate * num_bytes * num_runs
            kept_us = rate * num_bytes / micro_steps  # compute waits for these
            if name not in may_stay:
                floor += sent_us
                continue
            floor += min(kept_us, sent_us)
            if num_runs > 1:  # else it may live through forward and backward anyway
                lanes.append(Lane(max(0.0, sent_us - kept_us) / num_bytes, num_bytes))
        return floor, tuple(lanes)

    def _least_rate(self, kind: CollectiveKind, num_bytes: int, costs: CostTable) -> float:
        """Return the least time per byte of any bucket, in microseconds."""
        sizes = [num_bytes] if num_bytes else []
        size = _SMALLEST
        while size < num_bytes:
            sizes.append(size)
            size *= 2
        return min(
            (collective_us(kind, each, self.world_size, costs) / each for each in sizes),
            default=0.0,
        )
