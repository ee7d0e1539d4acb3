"""How far a plan can be from the best of its family: a time that none of it can beat."""

from __future__ import annotations

from torchloom.costs import CostTable
from torchloom.graph import movable
from torchloom.plan.field import Field
from torchloom.plan.found import Found
from torchloom.plan.frontier import Lane
from torchloom.plan.states import StateCosts


def least_added_us(
    best: Found,
    base: Field,
    costs: CostTable,
    states: StateCosts | None,
    micro_steps: int,
    saved_bytes: int,
) -> float:
    """Return what no plan within the budget undercuts in the time that it adds to compute.

    The bound begins with all on the device that may be elsewhere (weights gathered, pieces,
    states, activations), as if that had room, and frees what is too much the cheapest way.

    Args:
        best: the plan that is judged.
        base: the graph as it was captured, with its frontier.
        costs: times.
        states: what room is worth to optimizer states; None where they stay.
        micro_steps: runs of the graph per optimizer step.
        saved_bytes: the most that passes behind the split took away from any peak.
    """
    task, device = base.task, costs.device
    floor, lanes = task.traffic.least_us(costs, task.weights, micro_steps)
    if best.allowed is None:
        return min(floor, best.added_us)
    gathered, pieces = sum(int(lane.num_bytes) for lane in lanes), sum(task.pieces.values())
    begun = gathered + pieces
    ways = list(lanes)
    if task.pieces:  # each is reloaded at least once in a step
        price = device.link_load * 1e6 / device.h2d_bytes_per_s / micro_steps
        ways.append(Lane(price, pieces))
    if states is not None:
        begun += states.states.total_bytes
        ways += states.lanes()
    if task.swap is not None:
        ways.append(_copies(base, best, costs))
    kept = best.beside
    own = sum(task.traffic.bytes_of(name) for name in kept.weights if name in task.weights)
    own += sum(size for name, size in kept.pieces.items() if name in task.pieces)
    # What passes behind the split take away from a peak they may take away from any; weights and
    # pieces that stay may take away what others hold while they are in use.
    less = saved_bytes + sum(min(task.traffic.in_flight_bytes, each) for each in (gathered, pieces))
    reach = best.allowed + less + own - begun
    beside = min(base.frontier.beside_bytes, best.field.frontier.beside_bytes)
    return min(floor + base.frontier.bound_us(reach, beside, ways), best.added_us)


def _copies(base: Field, best: Found, costs: CostTable) -> Lane:
    """Return what copies can free at most in the time of the best candidate, and their price.

    A better plan takes less time than that, and a link is busy no longer than a step takes.
    """
    device = costs.device
    time_us = sum(base.cost_us) + best.added_us
    capacity = time_us / device.round_trip_us(at_once=True)
    owner = movable(base.task.joint)
    sizes = (
        sum(base.model.sizes[storage] for storage in base.model.fresh[index])
        for index, node in enumerate(base.model.nodes)
        if base.model.in_forward[index] and owner.get(node) is node
    )
    most = sum(size for size in sizes if size >= base.task.swap_min_bytes)
    return Lane(device.link_load * device.round_trip_us(), min(capacity, most))
