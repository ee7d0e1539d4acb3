"""A candidate that was tried, and which of two is better."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchloom.plan.combinations import Combination
from torchloom.plan.frontier import FrontierPoint
from torchloom.plan.problem import TrialResult

NOTICEABLE = 1e-3
"""Part of a graph's time that is worth another plan; less is rounding."""


@dataclass(frozen=True, slots=True)
class TriedPlan:
    """A candidate with the result of its trial."""

    combination: Combination
    point: FrontierPoint
    """Its recomputation."""
    result: TrialResult
    least_bytes: int
    """The lowest peak that any candidate was found to have."""
    states_us: float = 0.0
    """Extra time to stream optimizer states that do not fit on the device, per run of the graph."""

    @property
    def peak_bytes(self) -> int:
        """Of the graphs as they will run."""
        return self.result.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the budget is kept."""
        allowed_bytes = self.combination.allowed_bytes
        return allowed_bytes is None or self.peak_bytes <= allowed_bytes

    @property
    def added_us(self) -> float:
        """What the step takes beyond its compute."""
        return self.point.extra_us + self.result.overhead_us + self.states_us

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Smaller is better."""
        return (not self.fits, self.added_us if self.fits else 0.0, self.total_bytes)

    @property
    def total_bytes(self) -> int:
        """The peak of its code, with all that stays on the device beside it."""
        return self.peak_bytes + self.combination.code_bytes + self.combination.kept.num_bytes

    def is_short_of_memory(self, states_bytes: int) -> bool:
        """Say whether there is not room for everything that could be on the device.

        Args:
            states_bytes: optimizer states that could be.
        """
        form, allowed_bytes = self.combination.form, self.combination.allowed_bytes
        if allowed_bytes is None:
            return False
        problem = form.problem
        wanted_bytes = sum(problem.weight_bytes.values()) + sum(problem.shard_bytes.values())
        wanted_bytes += states_bytes
        least_us = form.frontier.points[0].extra_us
        return self.point.extra_us > least_us or self.peak_bytes + wanted_bytes > allowed_bytes


def better(one: TriedPlan, other: TriedPlan) -> TriedPlan:
    """Return the plan that is faster, or smaller where neither fits; of equals the first."""
    best = other if other.rank < one.rank and _is_worth_it(one, other) else one
    return replace(best, least_bytes=min(one.least_bytes, other.least_bytes))


def _is_worth_it(one: TriedPlan, other: TriedPlan) -> bool:
    """Say whether a change gains more than rounding: a plan that does less is easier to trust."""
    if one.fits != other.fits or not one.fits:
        return True
    gain_us = one.added_us - other.added_us
    return gain_us > NOTICEABLE * one.combination.form.compute_us or (
        gain_us >= 0 and other.total_bytes < one.total_bytes
    )
