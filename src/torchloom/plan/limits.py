"""What a plan of one graph may take, with the memory that other graphs need and that compilers were seen to add."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torchloom.costs import Device
from torchloom.plan.model import GraphPlan
from torchloom.plan.problem import KeptOnDevice
from torchloom.plan.states import HostStates


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
