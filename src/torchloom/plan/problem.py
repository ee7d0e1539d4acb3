"""What a planner is given: a joint graph, what may be decided about it, and a way to try decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from torchloom.memory import CalledPart
from torchloom.plan.traffic import Traffic
from torchloom.plan.transfer_sizes import CONFIGURED, TransferSizes


class PlanCandidate(NamedTuple):
    """All that can be decided about one joint graph, not yet tried."""

    recompute: frozenset[str]
    """Values that backward computes again."""
    resident: frozenset[str] = frozenset()
    """Parameters whose weights stay gathered from step to step."""
    transfers: TransferSizes = CONFIGURED
    shards: frozenset[str] = frozenset()
    """Parameters whose shard stays on the device, of those that may wait on the host."""


@dataclass(frozen=True, slots=True)
class KeptOnDevice:
    """Weights and shards that stay on the device beside a plan's peak, in bytes by parameter."""

    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    """Weights that stay gathered from step to step."""
    shard_bytes: Mapping[str, int] = field(default_factory=dict)
    """This rank's shards that could wait on the host."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.weight_bytes.values()) + sum(self.shard_bytes.values())

    def candidate(
        self, recompute: frozenset[str], transfers: TransferSizes = CONFIGURED
    ) -> PlanCandidate:
        """Return the candidate that keeps just this and recomputes the named values."""
        weights, shards = frozenset(self.weight_bytes), frozenset(self.shard_bytes)
        return PlanCandidate(recompute, weights, transfers, shards)

    def joined(self, other: KeptOnDevice) -> KeptOnDevice:
        """Return what either of the two keeps."""
        return KeptOnDevice(
            {**self.weight_bytes, **other.weight_bytes}, {**self.shard_bytes, **other.shard_bytes}
        )


class TrialResult(NamedTuple):
    """What a trial found: the memory and time of a candidate as it will run."""

    peak_bytes: int
    """Of the graphs as they will run, above what is live before and what stays on the device."""
    overhead_us: float = 0.0
    """What collectives and copies add to the time of compute."""
    copy_us: float = 0.0
    """Of this, copies to host memory and back."""


RunTrial = Callable[[PlanCandidate], TrialResult]
OffloadValues = Callable[[frozenset[str], frozenset[str]], "PlanningProblem"]
"""Returns the problem that is left when the values named first wait in host memory and backward
computes those named second again, from what comes back."""


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """A joint graph to plan: what may be decided about it, and how to try that."""

    joint: fx.Graph
    """Without dead and repeated nodes; values that tags drop already stay dropped."""
    num_results: int
    """How many of its outputs are forward's."""
    run_trial: RunTrial | None = None
    """Tries a candidate on copies of the graph; None where nothing moves nodes after the split."""
    batch_bytes: int = 0
    """Inputs that live as long as the step and are no parameters: the batch."""
    weight_bytes: dict[str, int] = field(default_factory=dict)
    """Whole weights that may stay gathered, by parameter."""
    shard_bytes: dict[str, int] = field(default_factory=dict)
    """Shards that wait on the host and may stay on the device, by parameter."""
    transfers: tuple[TransferSizes, ...] = ()
    """Other sizes of buckets and depths of prefetching to try, beside what the config says."""
    kind: str = ""
    """Equal for graphs that have to be planned alike, "" for none."""
    traffic: Traffic = field(default_factory=Traffic)
    """What is sent whatever is decided."""
    offload: OffloadValues | None = None
    """Lets activations wait in host memory; None where that was not asked for."""
    offload_min_bytes: int = 0
    """Smaller activations stay."""
    parts: tuple[CalledPart, ...] = ()
    """Parts of the graph that are calls of bodies in the graph that is compiled: what is decided about one
    of them costs a compile of its body, so few different choices are made."""

    def is_like(self, other: PlanningProblem) -> bool:
        """Say whether as much may be decided about this graph as about an equal one."""
        return (
            self.batch_bytes == other.batch_bytes
            and self.weight_bytes == other.weight_bytes
            and self.shard_bytes == other.shard_bytes
            and self.transfers == other.transfers
            and (self.offload is None) == (other.offload is None)
            and self.offload_min_bytes == other.offload_min_bytes
        )
