"""Trials of candidates: each is woven on copies of the graph, which gives its exact peak and its time."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchloom.costs import CostTable
from torchloom.plan.combinations import Combination
from torchloom.plan.estimates import Estimates
from torchloom.plan.frontier import FrontierPoint
from torchloom.plan.limits import PlanLimits
from torchloom.plan.problem import TrialResult


@dataclass
class Trials:
    """Runs the trials of one search, counts them, and learns from them.

    Args:
        costs: times of copies, for what is expected of others.
        limits: what a plan of the graph may take.
    """

    costs: CostTable
    limits: PlanLimits
    num_run: int = 0
    """How many candidates were tried on copies of the graphs."""
    estimates: Estimates = field(init=False)

    def __post_init__(self) -> None:
        self.estimates = Estimates(self.costs)

    def run(self, combination: Combination, point: FrontierPoint) -> TrialResult:
        """Try a combination with the recomputation of one point of its form's frontier."""
        form = combination.form
        candidate = combination.kept.candidate(form.names(point), combination.transfers)
        if form.problem.run_trial is None:
            result = TrialResult(point.peak_bytes)
        elif candidate in form.results:
            result = form.results[candidate]
        else:
            self.num_run += 1
            result = form.results[candidate] = form.problem.run_trial(candidate)
        self.estimates.learn(combination, point.peak_bytes, result)
        return result
