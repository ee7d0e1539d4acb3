"""The best combination of all uses of memory: the one that promises most is tried next."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torchloom.plan.combinations import Combination, combinations
from torchloom.plan.form import GraphForm
from torchloom.plan.frontier import FrontierPoint
from torchloom.plan.recompute import expected_us, improved
from torchloom.plan.trials import Trials
from torchloom.plan.tried import NOTICEABLE, TriedPlan


def best_combination(
    best: TriedPlan,
    forms: Sequence[GraphForm],
    trials: Trials,
    *,
    micro_steps: int,
    may_be_lean: bool,
) -> TriedPlan:
    """Use memory for whatever gains most, in any combination.

    Args:
        best: the best plan of the forms, with nothing kept beside them.
        forms: the graph as it was captured, and with activations that wait on the host.
        trials: of this search.
        micro_steps: runs of the graph per optimizer step.
        may_be_lean: whether transfers may be slower for the sake of memory.
    """
    base, form = forms[0], best.combination.form
    most = _most_trials(base)
    point = best.point if form is base else base.frontier.points[0]
    if base.problem.parts and not best.fits:
        point = _middle(base, best)
    every = list(
        combinations(
            forms, trials.limits, trials.costs, micro_steps=micro_steps, may_be_lean=may_be_lean
        )
    )
    for each in every:  # of what one use is worth alone all others are estimated
        if each.is_alone and each.form is base and trials.num_run < most:
            trials.run(each, point)
    waiting = {each.key: each for each in every}
    promise, noticeable_us = _Promise(trials), NOTICEABLE * base.compute_us
    if base.problem.parts and not best.fits:
        most *= 3  # else the whole graph is compiled, which takes far longer
    while waiting and trials.num_run < most:
        next_one = min(waiting.values(), key=promise)
        added_us, least_bytes = promise(next_one)
        if best.fits:
            is_idle = added_us + noticeable_us >= best.added_us
        else:
            is_idle = least_bytes >= best.total_bytes
        if is_idle:
            break
        del waiting[next_one.key]
        best = improved(best, next_one, trials)
    return best


def _middle(base: GraphForm, best: TriedPlan) -> FrontierPoint:
    """Return a point whose peak lies in its values and not in transfers, where the latter are too large.

    What smaller transfers save is seen at such a point; at the smallest one they would be all that there is.
    """
    allowed_bytes = best.combination.allowed_bytes or 0
    fitting = (p for p in base.frontier.points if 4 * p.peak_bytes <= 3 * allowed_bytes)
    return next(fitting, best.point)


class _Promise:
    """The time that a combination is expected to add, and the bytes that it needs at least."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._spent_us = functools.cache(functools.partial(expected_us, trials=trials))

    def __call__(self, each: Combination) -> tuple[float, int]:
        estimates = self._trials.estimates
        behind_bytes = estimates.behind_bytes(each) or 0
        added_us = self._spent_us(each, behind_bytes=behind_bytes) + estimates.overhead_us(each)
        least_bytes = each.form.frontier.min_peak_bytes + each.code_bytes
        return added_us, least_bytes + behind_bytes + each.kept.num_bytes


def _most_trials(base: GraphForm) -> int:
    """Return how many candidates to try on copies: fewer of large graphs, to stay within seconds."""
    if base.problem.parts:
        return 8  # a trial takes as long as compiling some of the bodies' calls
    # Trying one takes about 1 ms for each node.
    return max(16, min(200, 9_000 // max(len(base.model.nodes), 1)))
