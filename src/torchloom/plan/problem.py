"""What a planner is given: a joint graph, what may be decided about it, and a way to try it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from torchloom.plan.traffic import Traffic


class Flight(NamedTuple):
    """How much of a graph's transfers is in flight at a time; None is what the config says."""

    bucket_bytes: int | None = None
    """Gathers and reductions are merged up to this size."""
    prefetch_bytes: int | None = None
    """Weights gathered ahead of their use."""

    @property
    def is_lean(self) -> bool:
        """Whether memory is all that it can gain."""
        return self.bucket_bytes is not None


CONFIGURED = Flight()


class Trial(NamedTuple):
    """Decisions about one joint graph, to be tried on copies of it."""

    recompute: frozenset[str]
    """Values that backward computes again."""
    resident: frozenset[str] = frozenset()
    """Parameters that stay gathered."""
    flight: Flight = CONFIGURED
    pieces: frozenset[str] = frozenset()
    """Parameters whose piece stays on the device, of those that may wait on the host."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What lives on beside a plan's peak, in bytes by the names of parameters."""

    weights: Mapping[str, int] = field(default_factory=dict)
    """Gathered ones, whole."""
    pieces: Mapping[str, int] = field(default_factory=dict)
    """This rank's pieces that could wait on the host."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.weights.values()) + sum(self.pieces.values())

    def trial(self, recompute: frozenset[str], flight: Flight = CONFIGURED) -> Trial:
        """Return a trial under which just this lives on."""
        return Trial(recompute, frozenset(self.weights), flight, frozenset(self.pieces))

    def joined(self, other: Beside) -> Beside:
        """Return what lives on because of either."""
        return Beside({**self.weights, **other.weights}, {**self.pieces, **other.pieces})


class Outcome(NamedTuple):
    """What became of a trial."""

    peak_bytes: int
    """Of the graphs as they will run, above what is live before; residents are not part of it."""
    overhead_us: float = 0.0
    """What collectives and copies add to the time of compute."""
    copy_us: float = 0.0
    """Of this, copies to host memory and back."""


Verify = Callable[[Trial], Outcome]
Swap = Callable[[frozenset[str], frozenset[str]], "Task"]
"""The task that is left when the values named first wait in host memory and backward computes
those named second again, from what comes back."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A joint graph to plan."""

    joint: fx.Graph
    """Without dead and repeated nodes; values that tags drop already stay dropped."""
    num_results: int
    """How many of its outputs are forward's."""
    verify: Verify | None = None
    """None where nothing moves nodes after the split."""
    batch_bytes: int = 0
    """Inputs that live as long as the step and are no parameters: the batch."""
    weights: dict[str, int] = field(default_factory=dict)
    """Sharded parameters that may stay gathered, with the bytes of the whole."""
    pieces: dict[str, int] = field(default_factory=dict)
    """Pieces of parameters that wait on the host and may stay on the device, in bytes."""
    flights: tuple[Flight, ...] = ()
    """Other sizes of buckets, and other depths of prefetching, to try beside what the config says."""
    kind: str = ""
    """Equal for graphs that have to be planned alike, "" for none."""
    traffic: Traffic = field(default_factory=Traffic)
    """What is sent whatever is decided."""
    swap: Swap | None = None
    """Puts activations into host memory; None where that was not asked for."""
    swap_min_bytes: int = 0
    """Smaller activations stay."""

    def is_like(self, other: Task) -> bool:
        """Say whether as much may be decided about this graph as about an equal one."""
        return (
            self.batch_bytes == other.batch_bytes
            and self.weights == other.weights
            and self.pieces == other.pieces
            and self.flights == other.flights
            and (self.swap is None) == (other.swap is None)
            and self.swap_min_bytes == other.swap_min_bytes
        )
