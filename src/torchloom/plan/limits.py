"""What a plan of one graph may take, with the memory that other graphs and its code need."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchloom.plan.code_overhead import CodeOverhead
from torchloom.plan.model import GraphPlan
from torchloom.plan.problem import KeptOnDevice
from torchloom.plan.states import StateCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLimits:
    """The memory that a plan of one graph may use.

    Args:
        budget_bytes: for forward, backward and what stays on the device; None for no bound.
        overhead: what a compiler's code is known to need beyond its graphs.
        kept_before: what stays on the device because of graphs planned before this one.
        kept_bytes: what may stay on the device beside the peaks of all graphs; None for no bound.
        states: the price of optimizer states that find no room; None where they stay or the budget
            has no bound.
    """

    budget_bytes: int | None = None
    overhead: CodeOverhead = field(default_factory=CodeOverhead)
    kept_before: KeptOnDevice = field(default_factory=KeptOnDevice)
    kept_bytes: int | None = None
    states: StateCosts | None = None

    @property
    def states_bytes(self) -> int:
        """Optimizer states that would stay on the device if there were room."""
        return 0 if self.states is None else self.states.states.total_bytes

    def is_known_too_large(self, plan: GraphPlan) -> bool:
        """Say whether the code of a plan was compiled and needs more than it may."""
        if plan.budget_bytes is None or not self.overhead.knows(plan):
            return False
        return plan.peak_bytes + self.overhead.bytes_of(plan.offload) > plan.budget_bytes

    def states_us(self, allowed_bytes: int | None, peak_bytes: int, kept: KeptOnDevice) -> float:
        """Return what streaming optimizer states adds to a run of the graph, in microseconds.

        Args:
            allowed_bytes: what the peak may be; None for no bound.
            peak_bytes: what it is. The rest has room for states.
            kept: what stays on the device beside it.
        """
        if self.states is None or allowed_bytes is None:
            return 0.0
        return self.states.added_us(allowed_bytes - peak_bytes, kept)
