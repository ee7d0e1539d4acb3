"""Trials of candidates: each is woven on copies of the graph, which gives its exact peak and its time.

What a use of memory is worth is learned from trials of it alone. What several are worth together is
expected to be their sum, until a trial of them says otherwise.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from torchloom.costs import Device
from torchloom.plan.combinations import Combination
from torchloom.plan.frontier import FrontierPoint
from torchloom.plan.problem import PlanLimits, TrialResult
from torchloom.plan.transfer_sizes import CONFIGURED

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

    def or_better(self, other: TriedPlan) -> TriedPlan:
        """Return the plan that is faster, or smaller where neither fits; of equals this one."""
        best = other if self._loses_to(other) else self
        return replace(best, least_bytes=min(self.least_bytes, other.least_bytes))

    def _loses_to(self, other: TriedPlan) -> bool:
        """Say whether a change gains more than rounding: a plan that does less is easier to trust."""
        if self.fits != other.fits:
            return other.fits
        if not self.fits:
            return other.total_bytes < self.total_bytes
        gain_us = self.added_us - other.added_us
        return gain_us > NOTICEABLE * self.combination.form.compute_us or (
            gain_us >= 0 and other.total_bytes < self.total_bytes
        )


@dataclass
class Trials:
    """Runs the trials of one search, counts them, and learns from them what others would show.

    Args:
        device: whose links carry copies.
        limits: what a plan of the graph may take.
    """

    device: Device
    limits: PlanLimits
    num_run: int = 0
    """How many candidates were tried on copies of the graphs."""
    least_behind_bytes: int = 0
    """The least that passes behind the split added to a peak; less than 0: they took some away."""
    _start: Combination | None = None
    """The first that was tried: others are estimated by how they differ from it."""
    _overhead_us: dict[Hashable, float] = field(default_factory=dict)
    _error_us: dict[Hashable, float] = field(default_factory=dict)
    """How far estimates were off, by what was decided about gathers."""
    _behind_bytes: dict[Hashable, int] = field(default_factory=dict)
    """What passes behind the split last added to a peak, by the form and its gathers."""

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
        self._learn(combination, point.peak_bytes, result)
        return result

    def _learn(self, made: Combination, simulated_bytes: int, result: TrialResult) -> None:
        """Note a trial; the first is that of a graph with nothing kept."""
        behind_bytes = result.peak_bytes - simulated_bytes
        if self._start is None:
            self._start, self.least_behind_bytes = made, behind_bytes
        elif made.num_uses > 1:
            error_us = result.overhead_us - self._sum_us(self._start, made)
            self._error_us[made.gather_share, made.transfers] = error_us
        self._overhead_us[made.key] = result.overhead_us
        self._behind_bytes[made.gathers] = behind_bytes
        self.least_behind_bytes = min(self.least_behind_bytes, behind_bytes)

    @property
    def saved_bytes(self) -> int:
        """The most that passes behind the split took away from a peak."""
        return max(0, -min(self._behind_bytes.values(), default=0))

    def states_us(self, made: Combination, peak_bytes: int) -> float:
        """Return what streaming optimizer states adds where a combination has this peak."""
        return self.limits.states_us(made.allowed_bytes, peak_bytes, made.kept, self.device)

    def behind_bytes(self, combination: Combination) -> int | None:
        """Return what passes behind the split are expected to add to peaks; None: no idea.

        Copies start and end where passes put them: what frees memory in one form does so there, but
        what is in flight is much the same in all.
        """
        known = self._behind_bytes.get(combination.gathers)
        alone = self._behind_bytes.get((id(combination.form), CONFIGURED, 0.0))
        if known is not None or alone is None or self._start is None:
            return known
        form, transfers = id(self._start.form), combination.transfers
        start = self._behind_bytes[form, CONFIGURED, 0.0]
        ahead = self._behind_bytes.get((form, transfers, 0.0), start)
        gathers = form, transfers, combination.gather_share
        return alone + self._behind_bytes.get(gathers, ahead) - start

    def overhead_us(self, combination: Combination) -> float:
        """Return what transfers are expected to add to compute, or what they are known to add."""
        known = self._overhead_us.get(combination.key)
        if known is not None or self._start is None:
            return known or 0.0
        error_us = self._error_us.get((combination.gather_share, combination.transfers), 0.0)
        return max(0.0, self._sum_us(self._start, combination) + error_us)

    def _sum_us(self, start: Combination, other: Combination) -> float:
        """Return what the uses of a combination are worth alone, added up."""
        start_us, form = self._overhead_us[start.key], id(start.form)

        def effect_us(*key: Hashable, unknown_us: float = 0.0) -> float:
            known = self._overhead_us.get(key)
            return unknown_us if known is None else known - start_us

        return (
            start_us
            + effect_us(id(other.form), CONFIGURED, 0.0, 0.0, unknown_us=other.form.copied_us)
            + (1 - other.gather_share) * effect_us(form, other.transfers, 0.0, 0.0)
            + other.gather_share * effect_us(form, CONFIGURED, 1.0, 0.0)
            + other.copy_share * effect_us(form, CONFIGURED, 0.0, 1.0)
        )
