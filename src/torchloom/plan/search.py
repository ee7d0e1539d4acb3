"""The way from a joint graph to a plan: the fastest one within the limits, by all uses of memory.

    recompute   values that backward computes again: a point of the frontier
    offload     the values that are dearest to compute again wait on the host: a quarter to twice of
                what the link can carry during compute, or all; each set has its own frontier
    weights     stay gathered in memory that is free, or that more recomputing frees
    shards      stay on the device, and are not reloaded, in such memory
    states      of the optimizer stay on the device, in such memory
    transfers   how large buckets are, and how far ahead weights are gathered

Each candidate is tried on copies of the graphs as later passes leave them: its peak is exact, and its
time is that of a timeline over compute, network and links. Plans are compared by the time of the whole
step, so memory is saved where that costs least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchloom.costs import CostTable
from torchloom.memory import WorkspaceTable
from torchloom.plan.bound import least_added_us
from torchloom.plan.combinations import plain_combination
from torchloom.plan.combine import best_combination
from torchloom.plan.form import FormCache, GraphForm
from torchloom.plan.limits import PlanLimits
from torchloom.plan.model import GraphPlan
from torchloom.plan.offloads import offload_sets
from torchloom.plan.problem import CONFIGURED, PlanningProblem
from torchloom.plan.recompute import fastest_recomputation, improved, without_recomputation
from torchloom.plan.trials import Trials
from torchloom.plan.tried import TriedPlan
from torchloom.plan.write import write_plan


@dataclass
class Search:
    """Searches the plan of one joint graph.

    Args:
        costs: times.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        limits: what the plan may take.
        forms: forms of graphs that were described before.
        micro_steps: runs of the graph per optimizer step.
    """

    costs: CostTable
    workspaces: WorkspaceTable
    limits: PlanLimits
    forms: FormCache = field(default_factory=FormCache)
    micro_steps: int = 1
    _trials: Trials = field(init=False)

    def __post_init__(self) -> None:
        self._trials = Trials(self.costs, self.limits)

    def run(self, problem: PlanningProblem, digest: str) -> GraphPlan:
        """Return the plan of the best candidate; it may not fit if none does.

        Args:
            problem: the graph, and what may be decided about it.
            digest: of the graph.
        """
        # 1. Describe the graph: its exact memory, its times, and the frontier of recomputation.
        base = self.forms.form_of(problem, self.costs, self.workspaces)
        plans = []
        for best in self._best_first(base):
            # 5. What no plan within the limits undercuts, then the plan with its reasons.
            bound_us = least_added_us(best, base, self._trials, self.micro_steps)
            plans.append(write_plan(best, digest, self.limits.budget_bytes, bound_us))
            if not self.limits.is_known_too_large(plans[-1]):
                return plans[-1]
        return plans[0]

    def _best_first(self, base: GraphForm) -> Iterator[TriedPlan]:
        """Yield the best candidate, then the one to compile if the code of that is known not to fit."""
        problem = base.problem
        # 2. The fastest point of the frontier that fits, with all else as the config says.
        best = fastest_recomputation(plain_combination(base, self.limits), self._trials)
        # 3. Where memory is short: activations that wait on the host, each set with its frontier.
        forms, is_short = [base], best.is_short_of_memory(self.limits.states_bytes)
        if problem.offload is not None and is_short:
            for offload in offload_sets(base, self.costs.device):
                forms.append(base.offloaded(offload, self.costs, self.workspaces))
                best = improved(best, plain_combination(forms[-1], self.limits), self._trials)
        # 4. All uses of memory together: what promises most is tried, until nothing promises more.
        if problem.run_trial is not None:
            best = best_combination(
                best, forms, self._trials, micro_steps=self.micro_steps, may_be_lean=is_short
            )
        yield best
        # Compilers fuse best what is computed once: code that keeps every value may need less than
        # that of the smallest graph. Transfers are as small as they may be.
        kept = [
            without_recomputation(plain_combination(base, self.limits, transfers), self._trials)
            for transfers in (CONFIGURED, *problem.transfers)
        ]
        yield min(kept, key=lambda each: each.total_bytes)
