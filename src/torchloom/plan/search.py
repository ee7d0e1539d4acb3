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

A plan says by how much it may miss the best: `least_added_us` is a time that no plan within the same memory can beat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from torchloom.costs import measured_us
from torchloom.memory import module_of
from torchloom.plan.combinations import Combination, combination, combinations
from torchloom.plan.follow import op_of, places_of
from torchloom.plan.form import GraphForm
from torchloom.plan.frontier import FrontierPoint, MemorySource
from torchloom.plan.model import Decision, GraphPlan
from torchloom.plan.problem import KeptOnDevice, PlanLimits, PlanningProblem
from torchloom.plan.recompute import (
    expected_us,
    fastest_recomputation,
    improved,
    without_recomputation,
)
from torchloom.plan.transfer_sizes import CONFIGURED
from torchloom.plan.trials import NOTICEABLE, Trials, TriedPlan


def best_plan(base: GraphForm, limits: PlanLimits, digest: str) -> GraphPlan:
    """Return the plan of the best candidate; it may not fit if none does.

    Args:
        base: the graph as it was captured: its exact memory, its times, and the frontier of recomputation.
        limits: what the plan may take.
        digest: of the graph.
    """
    plans, trials = [], Trials(base.costs.device, limits)
    for best in _best_first(base, trials):
        # 4. What no plan within the limits undercuts, then the plan with its reasons.
        bound_us = least_added_us(best, base, trials)
        plans.append(_written(best, digest, limits.budget_bytes, bound_us))
        if not limits.overhead.knows(plans[-1]) or limits.overhead.fits(plans[-1]):
            return plans[-1]
    return plans[0]


def _best_first(base: GraphForm, trials: Trials) -> Iterator[TriedPlan]:
    """Yield the best candidate, then the one to compile if the code of that is known not to fit."""
    problem, limits = base.problem, trials.limits
    # 1. The fastest point of the frontier that fits, with all else as the config says.
    best = fastest_recomputation(combination(base, limits), trials)
    # 2. Where memory is short: activations that wait on the host, each set with its frontier.
    states_bytes = 0 if limits.states is None else limits.states.total_bytes
    forms, is_short = [base], best.is_short_of_memory(states_bytes)
    if problem.offload is not None and is_short:
        for form in base.offloaded():
            forms.append(form)
            best = improved(best, combination(form, limits), trials)
    # 3. All uses of memory together: what promises most is tried, until nothing promises more.
    if problem.run_trial is not None:
        best = _best_combination(best, forms, trials, may_be_lean=is_short)
    yield best
    # Compilers fuse best what is computed once: code that keeps every value may need less than
    # that of the smallest graph. Transfers are as small as they may be.
    kept = [
        without_recomputation(combination(base, limits, transfers=transfers), trials)
        for transfers in (CONFIGURED, *problem.transfers)
    ]
    yield min(kept, key=lambda each: each.total_bytes)


def _best_combination(
    best: TriedPlan, forms: Sequence[GraphForm], trials: Trials, *, may_be_lean: bool
) -> TriedPlan:
    """Use memory for whatever gains most, in any combination.

    Args:
        best: the best plan of the forms, with nothing kept beside them.
        forms: the graph as it was captured, and with activations that wait on the host.
        trials: of this search.
        may_be_lean: whether transfers may be slower for the sake of memory.
    """
    base, form = forms[0], best.combination.form
    most = _most_trials(base)
    point = best.point if form is base else base.frontier.points[0]
    if base.problem.parts and not best.fits:
        point = _middle(base, best)
    every = list(combinations(forms, trials.limits, may_be_lean=may_be_lean))
    for each in every:  # of what one use is worth alone all others are estimated
        if each.is_alone and each.form is base and trials.num_run < most:
            trials.run(each, point)
    waiting = {each.key: each for each in every}
    promise, noticeable_us = _promises(trials), NOTICEABLE * base.compute_us
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


def _promises(trials: Trials) -> Callable[[Combination], tuple[float, int]]:
    """Return what says the time that a combination is expected to add, and the bytes that it needs at least."""
    spent_us = functools.cache(functools.partial(expected_us, trials=trials))

    def promise(each: Combination) -> tuple[float, int]:
        behind_bytes = trials.behind_bytes(each) or 0
        added_us = spent_us(each, behind_bytes=behind_bytes) + trials.overhead_us(each)
        least_bytes = each.form.frontier.min_peak_bytes + each.code_bytes + each.kept.num_bytes
        return added_us, least_bytes + behind_bytes

    return promise


def _most_trials(base: GraphForm) -> int:
    """Return how many candidates to try on copies: fewer of large graphs, to stay within seconds."""
    if base.problem.parts:
        return 8  # a trial takes as long as compiling some of the bodies' calls
    # Trying one takes about 1 ms for each node.
    return max(16, min(200, 9_000 // max(len(base.model.nodes), 1)))


def _written(best: TriedPlan, digest: str, budget_bytes: int | None, bound_us: float) -> GraphPlan:
    """Return the plan of the best candidate: its figures, and what happens to each value."""
    made, point = best.combination, best.point
    form, kept = made.form, made.kept
    return GraphPlan(
        graph=digest,
        budget_bytes=None if budget_bytes is None else budget_bytes - kept.num_bytes,
        batch_bytes=form.problem.batch_bytes,
        peak_bytes=best.peak_bytes,
        graph_peak_bytes=best.peak_bytes,
        saved_bytes=point.saved_bytes,
        min_peak_bytes=min(best.least_bytes, form.frontier.min_peak_bytes),
        compute_us=form.compute_us,
        measured_us=sum(measured_us(node, form.costs) or 0.0 for node in form.model.nodes),
        extra_us=point.extra_us,
        overhead_us=best.result.overhead_us,
        copy_us=best.result.copy_us,
        states_us=best.states_us,
        bound_us=bound_us,
        decisions=_decisions(form, point),
        again=form.offload.recompute,
        resident=dict(kept.weight_bytes),
        pieces=dict(kept.shard_bytes),
        calls_bodies=bool(form.problem.parts),
        bucket_bytes=made.transfers.bucket_bytes,
        prefetch_bytes=made.transfers.prefetch_bytes,
    )


def _decisions(form: GraphForm, point: FrontierPoint) -> tuple[Decision, ...]:
    """List what matters: values that could cross, the biggest first, unread ones behind."""
    model, places = form.model, places_of(form.problem.joint)
    offloaded = form.offload.names
    kept, again = form.handed_over(point), form.recomputed(point)
    found = [(each.node, each.num_bytes, "offload", each.cost_us) for each in form.offload.values]
    for index in form.may_drop:
        node = model.nodes[index]
        if node.name not in offloaded:
            num_bytes = sum(model.sizes[storage] for storage in model.fresh[index])
            action = "keep" if index in kept else "recompute" if index in again else "unused"
            found.append((node, num_bytes, action, form.cost_us[index]))
    rows = [
        Decision(
            value=node.name,
            op=op_of(node),
            num_bytes=num_bytes,
            action=action,
            cost_us=round(cost_us, 3),
            where=module_of(node),
            place=places.get(node.name, ("", -1))[1],
        )
        for node, num_bytes, action, cost_us in found
    ]
    return tuple(sorted(rows, key=lambda row: (row.action == "unused", -row.num_bytes, row.value)))


def least_added_us(
    best: TriedPlan,
    base: GraphForm,
    trials: Trials,
) -> float:
    """Return what no plan within the budget undercuts in the time that it adds to compute.

    The bound begins with all on the device that may be elsewhere (weights gathered, shards,
    states, activations), as if that had room, and frees what is too much the cheapest way.

    Args:
        best: the plan that is judged.
        base: the graph as it was captured, with its frontier.
        trials: of this search, which have shown what passes behind the split take away from peaks.
    """
    costs, device, limits = base.costs, base.costs.device, trials.limits
    micro_steps, states = limits.micro_steps, limits.states
    problem, allowed_bytes = base.problem, best.combination.allowed_bytes
    floor_us, sources = problem.traffic.least_us(costs, problem.weight_bytes, micro_steps)
    if allowed_bytes is None:
        return min(floor_us, best.added_us)
    gathered_bytes = sum(int(each.num_bytes) for each in sources)
    shards_bytes = sum(problem.shard_bytes.values())
    begun_bytes, every = gathered_bytes + shards_bytes, list(sources)
    if problem.shard_bytes:  # each is reloaded at least once in a step
        us_per_byte = device.link_load * 1e6 / device.h2d_bytes_per_s / micro_steps
        every.append(MemorySource(us_per_byte, shards_bytes))
    if states is not None:
        begun_bytes += states.total_bytes
        every += (
            MemorySource(each.us_per_byte / micro_steps, each.num_bytes)
            for each in states.sources(device)
        )
    # What passes behind the split take away from a peak they may take away from any; weights and
    # shards that stay may take away what others hold while they are in use.
    in_flight_bytes = problem.traffic.in_flight_bytes
    less_bytes = trials.saved_bytes
    less_bytes += min(in_flight_bytes, gathered_bytes) + min(in_flight_bytes, shards_bytes)
    own_bytes = _own_bytes(best.combination.kept, problem)
    if problem.offload is not None:
        every.append(_copies(base, best))
    reach_bytes = allowed_bytes + less_bytes + own_bytes - begun_bytes
    frontiers = base.frontier, best.combination.form.frontier
    beside_bytes = min(each.beside_bytes for each in frontiers)
    bound_us = base.frontier.bound_us(reach_bytes, beside_bytes, every)
    return min(floor_us + bound_us, best.added_us)


def _own_bytes(kept: KeptOnDevice, problem: PlanningProblem) -> int:
    """Return what stays on the device and this graph could have elsewhere."""
    may_stay = problem.weight_bytes
    gathered = sum(problem.traffic.bytes_of(name) for name in kept.weight_bytes if name in may_stay)
    shards = problem.shard_bytes
    return gathered + sum(size for name, size in kept.shard_bytes.items() if name in shards)


def _copies(base: GraphForm, best: TriedPlan) -> MemorySource:
    """Return what copies can free at most in the time of the best candidate, and their price.

    A better plan takes less time than that, and a link is busy no longer than a step takes.
    """
    device = base.costs.device
    time_us = base.compute_us + best.added_us
    capacity_bytes = time_us / device.round_trip_us(at_once=True)
    sizes = (
        sum(base.model.sizes[storage] for storage in base.model.fresh[index])
        for index, node in enumerate(base.model.nodes)
        if base.model.in_forward[index] and base.movable.get(node) is node
    )
    most_bytes = sum(size for size in sizes if size >= base.problem.offload_min_bytes)
    us_per_byte = device.link_load * device.round_trip_us()
    return MemorySource(us_per_byte, min(capacity_bytes, most_bytes))
