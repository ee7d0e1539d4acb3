"""What a planner is given: a joint graph, what may be decided about it, a way to try decisions, and what a plan may take."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from torchloom.costs import Device
from torchloom.memory import CalledPart
from torchloom.plan.model import GraphPlan
from torchloom.plan.states import HostStates
from torchloom.plan.transfer_sizes import CONFIGURED, Traffic, TransferSizes


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


@dataclass
class CodeOverhead:
    """What the compiled code of one graph's plans needed beyond the graphs.

    Fusion makes code need less, buffers laid out anew make it need more, and activations that wait on the
    host change both: what is learned with one set of offloaded values is taken for another set only until
    that one was compiled as well.

    Example:
        >>> CodeOverhead().bytes_of(frozenset())
        0
    """

    _bytes_by_offload: dict[frozenset[str], int] = field(default_factory=dict)
    """By the names of the offloaded activations; what was learned last stands last."""
    _compiled: set[Hashable] = field(default_factory=set)
    """The choices of plans that were compiled."""

    @property
    def key(self) -> str:
        """Text of all that is known, equal on all ranks."""
        known = [(sorted(names), size) for names, size in self._bytes_by_offload.items()]
        return f"{known} {len(self._compiled)}"

    def learn(self, plan: GraphPlan) -> None:
        """Note the difference between a plan's graphs and the code that was compiled for them."""
        self._bytes_by_offload.pop(plan.offload, None)
        self._bytes_by_offload[plan.offload] = plan.peak_bytes - plan.graph_peak_bytes
        self._compiled.add(plan.choices)

    def knows(self, plan: GraphPlan) -> bool:
        """Say whether a plan that decides the same was compiled."""
        return plan.choices in self._compiled

    def fits(self, plan: GraphPlan) -> bool:
        """Say whether the code of a plan is expected to keep its budget."""
        code_bytes = plan.peak_bytes + self.bytes_of(plan.offload)
        return plan.budget_bytes is None or code_bytes <= plan.budget_bytes

    def bytes_of(self, offloaded: frozenset[str]) -> int:
        """Return what code is expected to need beyond graphs that offload these activations."""
        known = self._bytes_by_offload
        last = next(reversed(known.values()), 0)
        return known.get(offloaded, known.get(frozenset(), last))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLimits:
    """The memory that a plan of one graph may use.

    Args:
        budget_bytes: for forward, backward and what stays on the device; None for no bound.
        overhead: what a compiler's code is known to need beyond its graphs.
        kept_before: what stays on the device because of graphs planned before this one.
        kept_bytes: what may stay on the device beside the peaks of all graphs; None for no bound.
        states: optimizer states that wait on the host unless there is room; None where they stay.
        micro_steps: runs of the graph between two steps of the optimizer.
    """

    budget_bytes: int | None = None
    overhead: CodeOverhead = field(default_factory=CodeOverhead)
    kept_before: KeptOnDevice = field(default_factory=KeptOnDevice)
    kept_bytes: int | None = None
    states: HostStates | None = None
    micro_steps: int = 1

    def states_us(
        self, allowed_bytes: int | None, peak_bytes: int, kept: KeptOnDevice, device: Device
    ) -> float:
        """Return what streaming optimizer states adds to a run of the graph, in microseconds.

        Args:
            allowed_bytes: what the peak may be; None for no bound.
            peak_bytes: what it is. The rest has room for states.
            kept: what stays on the device beside it, also while other graphs run.
            device: whose links carry the states.
        """
        if self.states is None or allowed_bytes is None:
            return 0.0
        free_bytes = allowed_bytes - peak_bytes
        if self.kept_bytes is not None:
            free_bytes = min(free_bytes, self.kept_bytes - kept.num_bytes)
        shard_bytes = sum(kept.shard_bytes.values())
        return self.states.added_us(max(0, free_bytes), device, shard_bytes) / self.micro_steps
