"""The fastest plan of a joint graph within a budget, over all that can be done about its values.

    recompute   from the frontier: the fastest of its plans that fits as it will run
    offload     the values that are dearest to compute again wait on the host, as many as the link
                can carry beside compute, and fewer, and more; each with a frontier of its own
    residents   weights that stay gathered in the room that is left, or that more recomputing makes
    pieces      of parameters that stay on the device, and are not reloaded, in such room
    states      of the optimizer, that stay on the device in the room that is left, or is made
    flight      how large buckets are, and how far ahead weights are gathered

Each candidate is tried on copies of the graphs as later passes leave them: its peak is exact, its
time is that of a timeline over compute, network and links. Memory that is cheaper elsewhere goes
there: what counts is the time of the whole step. Of all combinations those are tried that promise
most by what was learned so far (candidates.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchloom.costs import CostTable
from torchloom.memory import WorkspaceTable
from torchloom.plan.beyond import Beyond
from torchloom.plan.bound import least_added_us
from torchloom.plan.candidates import Candidate, Estimates, candidates, copied_us
from torchloom.plan.field import Field, Fields, Move, field_of
from torchloom.plan.found import NOTICEABLE, Found, better
from torchloom.plan.frontier import Point
from torchloom.plan.model import GraphPlan
from torchloom.plan.moves import moves_of
from torchloom.plan.states import StateCosts
from torchloom.plan.task import CONFIGURED, Beside, Outcome, Task


@dataclass
class Search:
    """Searches one joint graph.

    Args:
        costs: times.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        budget_bytes: what forward, backward and residents may take; None for no bound.
        beyond: what a compiler's code is known to need beyond its graphs.
        given: what lives on because of other graphs.
        room_beside: what may live on beside all peaks at most; None for no bound.
        fields: frontiers that were searched before.
        micro_steps: runs of the graph per optimizer step.
        states: what room is worth to optimizer states that otherwise wait on the host; None where
            they stay or the budget has no bound.
    """

    costs: CostTable
    workspaces: WorkspaceTable
    budget_bytes: int | None
    beyond: Beyond = field(default_factory=Beyond)
    given: Beside = field(default_factory=Beside)
    room_beside: int | None = None
    fields: Fields = field(default_factory=Fields)
    micro_steps: int = 1
    states: StateCosts | None = None
    num_outcomes: int = 0
    """How many candidates were tried on copies of the graphs."""
    _estimates: Estimates = field(init=False)

    def __post_init__(self) -> None:
        self._estimates = Estimates(self.costs)

    def run(self, task: Task, digest: str) -> GraphPlan:
        """Return the plan of the best candidate; it may not fit if none does."""
        base = self._field(task)
        best = self._recomputing(Candidate(form=base, beside=self.given))
        forms = [base]
        is_scarce = self._is_scarce(best)
        if task.swap is not None and is_scarce:
            for move in moves_of(base, self.costs.device):
                forms.append(base.moved(move, self._made))
                best = self._with(best, Candidate(form=forms[-1], beside=self.given))
        if task.verify is not None:
            best = self._together(best, forms, may_be_lean=is_scarce)
        return self._plan(best, base, digest)

    def plain(self, task: Task, digest: str) -> GraphPlan:
        """Return the plan that keeps whatever may be kept, in the least room that transfers allow."""
        base = self._field(task)
        tried = []
        for flight in (CONFIGURED, *task.flights):
            candidate = Candidate(form=base, beside=self.given, flight=flight)
            outcome = self._outcome(candidate, base.frontier.points[0])
            tried.append(self._found(candidate, 0, outcome, outcome.peak_bytes))
        return self._plan(min(tried, key=lambda each: each.total_bytes), base, digest)

    def _plan(self, best: Found, base: Field, digest: str) -> GraphPlan:
        saved = self._estimates.saved_bytes
        bound_us = least_added_us(best, base, self.costs, self.states, self.micro_steps, saved)
        return best.plan(digest, base.task, self.budget_bytes, bound_us)

    def _found(self, candidate: Candidate, at: int, outcome: Outcome, least: int) -> Found:
        form, beside = candidate.form, candidate.beside
        allowed = self._allowed(form, beside)
        return Found(
            field=form,
            at=at,
            outcome=outcome,
            allowed=allowed,
            beside=beside,
            flight=candidate.flight,
            least=least,
            states_us=self._states_us(allowed, outcome.peak_bytes, beside),
            beyond=self._beyond_bytes(form),
        )

    def _field(self, task: Task) -> Field:
        found = self.fields.get(task, self.costs)
        if found is None:
            found = self._made(task)
            self.fields.put(found, self.costs)
        return found

    def _made(self, task: Task, move: Move | None = None) -> Field:
        return field_of(task, self.costs, self.workspaces, move)

    def _allowed(self, form: Field, beside: Beside) -> int | None:
        if self.budget_bytes is None:
            return None
        return self.budget_bytes - self._beyond_bytes(form) - beside.num_bytes

    def _beyond_bytes(self, form: Field) -> int:
        return self.beyond.bytes_of(form.move.names)

    def _recomputing(self, candidate: Candidate, limit_us: float | None = None) -> Found:
        """Return the fastest plan of a candidate that fits as it will run, the smallest if none does.

        Passes behind the split change peaks little and in the same direction for all points, so the
        first one that fits is near where it was last time. A smaller one may leave room for
        optimizer states that is worth more than what it computes again. The search ends early where
        a trial shows that all plans take `limit_us` or more.
        """
        form, beside = candidate.form, candidate.beside
        points, allowed = form.frontier.points, self._allowed(form, beside)
        outcomes: dict[int, Outcome] = {}

        def peak_of(at: int) -> int:
            if at not in outcomes:
                outcomes[at] = self._outcome(candidate, points[at])
            return outcomes[at].peak_bytes

        def found(at: int) -> Found:
            least = min(each.peak_bytes for each in outcomes.values())
            return self._found(candidate, at, outcomes[at], least)

        if allowed is None or self._estimates.behind_bytes(candidate) is None:
            peak_of(0)
        if allowed is None:
            return found(0)
        room = allowed - (self._estimates.behind_bytes(candidate) or 0)
        expected = (at for at, point in enumerate(points) if point.peak_bytes <= room)
        at, step, low, high = next(expected, len(points) - 1), 1, -1, len(points)
        while high - low > 1:  # `low` does not fit, `high` does
            if peak_of(at) <= allowed:
                high, aim = at, at - step
            else:
                low, aim = at, at + step
            # What transfers add hardly depends on what is computed again.
            overhead_us = outcomes[at].overhead_us
            if limit_us is not None and self._least_us(candidate) + overhead_us >= limit_us:
                break
            at, step = aim if low < aim < high else (low + high) // 2, 2 * step
        fitting = [at for at, each in outcomes.items() if each.peak_bytes <= allowed]
        if not fitting:
            peak_of(0)  # what is computed again may need more than it frees
            return found(min(outcomes, key=peak_of))
        first = min(fitting)
        more = points[first].peak_bytes - peak_of(first)  # passes behind the split took this away

        def expected_us(at: int) -> float:
            peak_bytes = points[at].peak_bytes - more
            return points[at].extra_us + self._states_us(allowed, peak_bytes, beside)

        roomy = min(range(first, len(points)), key=expected_us)
        if roomy == first or peak_of(roomy) > allowed:
            return found(first)
        return better(found(first), found(roomy))

    def _outcome(self, candidate: Candidate, point: Point) -> Outcome:
        form = candidate.form
        trial = candidate.beside.trial(form.names(point), candidate.flight)
        self.num_outcomes += not form.knows(trial)
        outcome = form.outcome(point, trial)
        self._estimates.learn(candidate, point, outcome)
        return outcome

    def _states_us(self, allowed: int | None, peak_bytes: int, beside: Beside) -> float:
        if self.states is None or allowed is None:
            return 0.0
        return self.states.us(allowed - peak_bytes, beside)

    def _together(self, best: Found, forms: Sequence[Field], *, may_be_lean: bool) -> Found:
        """Use memory for whatever gains most, in any combination.

        Args:
            best: of the forms, with nothing beside them.
            forms: the graph as it was captured, and with activations that wait on the host.
            may_be_lean: whether transfers may be slower for the sake of memory.
        """
        base, num_nodes = forms[0], len(forms[0].model.nodes)
        most, noticeable_us = _most_outcomes(num_nodes), NOTICEABLE * sum(base.cost_us)
        point = best.point if best.field is base else base.frontier.points[0]
        every = [
            each
            for each in candidates(forms, self.given, self.costs, self.micro_steps)
            if self.room_beside is None or each.beside.num_bytes <= self.room_beside
            if may_be_lean or not each.flight.is_lean
        ]
        for each in every:  # of what one use is worth alone all others are estimated
            if each.is_alone and each.form is base and self.num_outcomes < most:
                self._outcome(each, point)
        waiting = {each.key: each for each in every}
        spent_us = functools.cache(self._spent_us)

        def expected(each: Candidate) -> tuple[float, int]:
            behind = self._estimates.behind_bytes(each) or 0
            us = spent_us(each, behind) + self._estimates.overhead_us(each)
            least = each.form.frontier.min_peak_bytes + self._beyond_bytes(each.form)
            return us, least + behind + each.beside.num_bytes

        while waiting and self.num_outcomes < most:
            next_one = min(waiting.values(), key=expected)
            us, least_bytes = expected(next_one)
            if best.fits:
                is_idle = us + noticeable_us >= best.added_us
            else:
                is_idle = least_bytes >= best.total_bytes
            if is_idle:
                break
            del waiting[next_one.key]
            best = self._with(best, next_one)
        return best

    def _is_scarce(self, best: Found) -> bool:
        """Say whether there is not room for everything that could be on the device."""
        task, room = best.field.task, self._allowed(best.field, self.given)
        if room is None:
            return False
        wanted = sum(task.weights.values()) + sum(task.pieces.values())
        if self.states is not None:
            wanted += self.states.states.total_bytes
        least_us = best.field.frontier.points[0].extra_us
        return best.point.extra_us > least_us or best.peak_bytes + wanted > room

    def _with(self, best: Found, candidate: Candidate) -> Found:
        """Return the best plan of a candidate, or the one before."""
        if not best.fits:
            return better(best, self._recomputing(candidate))
        least_us = self._least_us(candidate) + copied_us(candidate.form, self.costs)
        if least_us >= best.added_us:
            return best  # the room would cost more than could be gained
        return better(best, self._recomputing(candidate, best.added_us))

    def _least_us(self, candidate: Candidate) -> float:
        """Return what computing again takes at least, whatever later passes add to the peak."""
        form, allowed = candidate.form, self._allowed(candidate.form, candidate.beside)
        behind = self._estimates.behind_bytes(candidate)
        if allowed is None or behind is None:
            return form.frontier.points[0].extra_us
        point = form.frontier.within(allowed - min(0, behind))
        return float("inf") if point is None else point.extra_us

    def _spent_us(self, candidate: Candidate, behind: int) -> float:
        """Return what computing again and streaming states are expected to take.

        Args:
            candidate: what is looked at.
            behind: bytes that passes behind the split add to its peaks.
        """
        beside, points = candidate.beside, candidate.form.frontier.points
        allowed = self._allowed(candidate.form, beside)
        if allowed is None:
            return points[0].extra_us
        fitting = ((p, p.peak_bytes + behind) for p in points if p.peak_bytes + behind <= allowed)
        spent = (p.extra_us + self._states_us(allowed, peak, beside) for p, peak in fitting)
        return min(spent, default=float("inf"))


def _most_outcomes(num_nodes: int) -> int:
    """Return how many candidates to try on copies: fewer of large graphs, to stay within seconds."""
    # Trying one takes about 1 ms for each node.
    return max(16, min(200, 9_000 // max(num_nodes, 1)))
