"""How much one combination recomputes: the point of its frontier that is fastest within the budget."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from torchloom.plan.combinations import Combination
from torchloom.plan.frontier import FrontierPoint
from torchloom.plan.problem import TrialResult
from torchloom.plan.trials import Trials, TriedPlan

_GUESSES = 6
"""Trials whose results say where to try next; behind them the rest is halved."""


def improved(best: TriedPlan, combination: Combination, trials: Trials) -> TriedPlan:
    """Return the best plan of a combination where it is better than the best one before.

    Args:
        best: the one before.
        combination: what is tried now.
        trials: of this search.
    """
    limit_us = best.added_us if best.fits else None
    if limit_us is not None:
        least_us = _least_us(combination, trials) + combination.form.copied_us
        if least_us >= limit_us:
            return best  # the room would cost more than could be gained
    return best.or_better(fastest_recomputation(combination, trials, limit_us))


def fastest_recomputation(
    combination: Combination, trials: Trials, limit_us: float | None = None
) -> TriedPlan:
    """Return the fastest plan of a combination that fits as it will run, the smallest if none does.

    A point that recomputes more may leave room for optimizer states that is worth more than what it
    computes again.

    Args:
        combination: all that is decided but what is recomputed.
        trials: of this search.
        limit_us: the search ends early where a trial shows that all points add this much or more.
    """
    tried, allowed_bytes = _TriedPoints(combination, trials), combination.allowed_bytes
    # Peaks of graphs that call bodies are expected well enough to try first what is expected to fit.
    is_unknown = trials.behind_bytes(combination) is None
    if allowed_bytes is None or (is_unknown and not combination.form.problem.parts):
        tried.run(0)
    if allowed_bytes is None:
        return tried.plan(0)
    tried.search(allowed_bytes, limit_us)
    fitting = [at for at, each in tried.results.items() if each.peak_bytes <= allowed_bytes]
    if not fitting:
        if not combination.form.problem.parts:
            tried.run(0)  # what is computed again may need more than it frees
        return tried.plan(min(tried.results, key=lambda at: tried.results[at].peak_bytes))
    first = min(fitting)
    roomy = tried.fastest_with_states(first)
    if roomy == first or tried.run(roomy).peak_bytes > allowed_bytes:
        return tried.plan(first)
    return tried.plan(first).or_better(tried.plan(roomy))


def without_recomputation(combination: Combination, trials: Trials) -> TriedPlan:
    """Return the plan of a combination that recomputes nothing, whether it fits or not."""
    tried = _TriedPoints(combination, trials)
    tried.run(0)
    return tried.plan(0)


@dataclass
class _TriedPoints:
    """The points of one combination's frontier that were tried, by their place on it."""

    combination: Combination
    trials: Trials
    results: dict[int, TrialResult] = field(default_factory=dict)

    @property
    def points(self) -> tuple[FrontierPoint, ...]:
        """Of the frontier, from fast to small."""
        return self.combination.form.frontier.points

    def run(self, at: int) -> TrialResult:
        """Try a point, once."""
        if at not in self.results:
            self.results[at] = self.trials.run(self.combination, self.points[at])
        return self.results[at]

    def plan(self, at: int) -> TriedPlan:
        """Return the plan of a point that was tried."""
        result = self.results[at]
        least_bytes = min(each.peak_bytes for each in self.results.values())
        states_us = self.trials.states_us(self.combination, result.peak_bytes)
        return TriedPlan(self.combination, self.points[at], result, least_bytes, states_us)

    def search(self, allowed_bytes: int, limit_us: float | None) -> None:
        """Try points until the first one that fits is known.

        Passes behind the split change peaks little and in the same direction for all points: what a trial
        finds of that says where to try next. Where the peak lies elsewhere, in transfers that no point changes, it
        says too little: a second move in one direction is at least twice as far as the first. Of a graph that calls
        bodies, a trial takes as long as compiling some of them: there a point that fits is the first one if no
        faster one is expected to fit, and the fastest that may fit is tried soon.

        Args:
            allowed_bytes: what a peak may be.
            limit_us: see `fastest_recomputation`.
        """
        points, trials = self.points, self.trials
        room_bytes = allowed_bytes - (trials.behind_bytes(self.combination) or 0)
        at, low, high = self._first_within(room_bytes), -1, len(points)
        trusts, moved = bool(self.combination.form.problem.parts), 0
        for turn in itertools.count():
            result = self.run(at)
            if result.peak_bytes <= allowed_bytes:
                high = at
            else:
                low = at
            if high - low <= 1:  # `low` does not fit, `high` does
                break
            # What transfers add hardly depends on what is computed again.
            least_us = _least_us(self.combination, trials) + result.overhead_us
            if limit_us is not None and least_us >= limit_us:
                break
            behind_bytes = result.peak_bytes - points[at].peak_bytes
            aim = self._first_within(allowed_bytes - behind_bytes)
            if trusts and at == high <= aim:
                break
            if at == high:  # on to faster points
                aim = min(aim, at - 1, at + 2 * min(moved, 0))
                if trusts:
                    least_bytes = trials.least_behind_bytes
                    hoped = self._first_within(allowed_bytes - least_bytes)
                    aim = min(aim, hoped) if hoped > low else aim
            else:
                aim = max(aim, at + 1, at + 2 * max(moved, 0))
            aim = min(max(aim, low + 1), high - 1) if turn < _GUESSES else (low + high) // 2
            at, moved = aim, aim - at

    def _first_within(self, room_bytes: int) -> int:
        """Return the fastest point that fits by what is known of its graphs before passes, or the smallest."""
        points = self.points
        found = (at for at, point in enumerate(points) if point.peak_bytes <= room_bytes)
        return next(found, len(points) - 1)

    def fastest_with_states(self, first: int) -> int:
        """Return the point from the first one that fits on that is fastest with the states that it leaves room for."""
        # Passes behind the split took this away.
        saved_bytes = self.points[first].peak_bytes - self.results[first].peak_bytes

        def expected_us(at: int) -> float:
            point = self.points[at]
            peak_bytes = point.peak_bytes - saved_bytes
            return point.extra_us + self.trials.states_us(self.combination, peak_bytes)

        return min(range(first, len(self.points)), key=expected_us)


def expected_us(combination: Combination, trials: Trials, behind_bytes: int) -> float:
    """Return what recomputing and streaming states are expected to take, in microseconds.

    Args:
        combination: what is looked at.
        trials: of this search.
        behind_bytes: what passes behind the split add to its peaks.
    """
    allowed_bytes, points = combination.allowed_bytes, combination.form.frontier.points
    if allowed_bytes is None:
        return points[0].extra_us
    peaks = ((point, point.peak_bytes + behind_bytes) for point in points)
    found = (
        point.extra_us + trials.states_us(combination, peak_bytes)
        for point, peak_bytes in peaks
        if peak_bytes <= allowed_bytes
    )
    return min(found, default=float("inf"))


def _least_us(combination: Combination, trials: Trials) -> float:
    """Return what recomputing takes at least, whatever later passes add to the peak."""
    frontier, allowed_bytes = combination.form.frontier, combination.allowed_bytes
    behind_bytes = trials.behind_bytes(combination)
    if allowed_bytes is None or behind_bytes is None:
        return frontier.points[0].extra_us
    point = frontier.within(allowed_bytes - min(0, behind_bytes))
    return float("inf") if point is None else point.extra_us
