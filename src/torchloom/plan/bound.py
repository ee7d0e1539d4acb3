"""How good a plan is: a time that no plan within the same memory can beat."""

from __future__ import annotations

from torchloom.plan.form import GraphForm
from torchloom.plan.frontier import MemorySource
from torchloom.plan.problem import KeptOnDevice, PlanningProblem
from torchloom.plan.trials import Trials, TriedPlan


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
