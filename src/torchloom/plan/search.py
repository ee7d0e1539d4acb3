"""The fastest plan of a joint graph within a budget, over all that can be done about its values.

    recompute   from the frontier: the fastest of its plans that fits as it will run
    offload     the values that are dearest to compute again wait on the host, as many as the link
                can carry beside compute, and fewer, and more; each with a frontier of its own
    residents   weights that stay gathered in the room that is left, or that more recomputing makes
    depth       how far ahead weights are gathered

Each candidate is tried on copies of the graphs as later passes leave them: its peak is exact, its
time is that of a timeline over compute, network and links. Memory that is cheaper elsewhere goes
there: what counts is the time of the whole step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from torchloom.graph import droppable, movable
from torchloom.plan.costs import CostTable, measured_us, node_us
from torchloom.plan.frontier import Frontier, Point, crossing, frontier
from torchloom.plan.memory import WorkspaceTable
from torchloom.plan.memory.joint import JointModel, joint_model
from torchloom.plan.model import Decision, GraphPlan
from torchloom.plan.task import Outcome, Task, Trial

_SHARES = (0.25, 0.5, 1.0, 2.0)
"""Of what a link can carry while compute runs: how much is offloaded in a candidate."""
_CHEAP = 0.25
"""What takes less than this part of a copy's time to compute again is never copied."""
_SHARES_OF_WEIGHTS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
"""Of all weights: how many stay gathered in a candidate."""

_ROOT = re.compile(r"^L\['\w+'\](\.__self__)?\.?")
"""How Dynamo names the module that it captured: `L['self'].blocks.0` is `blocks.0`."""


def num_trials(num_nodes: int) -> int:
    """Return how many plans of a graph to simulate: fewer of large ones, to stay within seconds."""
    return max(24, min(160, 400_000 // max(num_nodes, 1)))


@dataclass(frozen=True, slots=True)
class Swapped:
    """A value that waits in host memory."""

    node: fx.Node
    num_bytes: int
    cost_us: float
    """Of computing it again, which is not done."""


@dataclass(slots=True)
class Field:
    """One form of a joint graph, and all plans of its recomputation."""

    task: Task
    model: JointModel
    may_drop: set[int]
    cost_us: list[float]
    frontier: Frontier
    measured_us: float = 0.0
    """Of the time of all nodes, what was measured."""
    swapped: tuple[Swapped, ...] = ()
    again: frozenset[str] = frozenset()
    """Values that are computed again from swapped ones."""
    _seen: dict[Trial, Outcome] = field(default_factory=dict)

    def outcome(self, point: Point, trial: Trial) -> Outcome:
        """Return what becomes of a plan as it will run."""
        if self.task.verify is None:
            return Outcome(point.peak_bytes)
        if trial not in self._seen:
            self._seen[trial] = self.task.verify(trial)
        return self._seen[trial]

    def names(self, point: Point) -> frozenset[str]:
        """Return the values that a plan computes again."""
        return frozenset(self.model.nodes[i].name for i in point.dropped)


class Fields:
    """Frontiers of tasks, for as long as times are what they were: a task is planned several times."""

    def __init__(self) -> None:
        self._known: list[tuple[Field, CostTable]] = []

    def get(self, task: Task, costs: CostTable) -> Field | None:
        """Return the field of this very task under this very table."""
        for found, table in self._known:
            if found.task is task and table is costs:
                return found
        return None

    def put(self, found: Field, costs: CostTable) -> None:
        """Remember a field."""
        self._known.append((found, costs))

    def clear(self) -> None:
        """Forget all fields: graphs or times are about to change."""
        self._known.clear()


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate that was tried."""

    field: Field
    at: int
    """Its place on the frontier."""
    outcome: Outcome
    allowed: int | None
    """What its peak may be."""
    resident: Mapping[str, int]
    prefetch_bytes: int | None
    least: int
    """The lowest peak that any candidate was found to have."""

    @property
    def point(self) -> Point:
        """Its plan of recomputation."""
        return self.field.frontier.points[self.at]

    @property
    def peak_bytes(self) -> int:
        """Of the graphs as they will run."""
        return self.outcome.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the budget is kept."""
        return self.allowed is None or self.peak_bytes <= self.allowed

    @property
    def added_us(self) -> float:
        """What the step takes beyond its compute."""
        return self.point.extra_us + self.outcome.overhead_us

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Smaller is better."""
        return (not self.fits, self.added_us if self.fits else 0.0, self.total_bytes)

    @property
    def total_bytes(self) -> int:
        """The peak with all residents."""
        return self.peak_bytes + sum(self.resident.values())

    def plan(self, digest: str, task: Task, budget: int | None) -> GraphPlan:
        """Return the plan, with its reasons."""
        costs = self.field.cost_us
        bound = self.point.extra_us
        if self.allowed is None:
            bound = 0.0
        elif not self.field.swapped:
            reach = max(self.allowed, self.point.peak_bytes)
            bound = min(self.field.frontier.bound_us(reach), bound)
        else:
            bound = 0.0  # copies beside compute may take the place of computing again
        return GraphPlan(
            graph=digest,
            budget_bytes=None if budget is None else budget - sum(self.resident.values()),
            batch_bytes=task.batch_bytes,
            peak_bytes=self.peak_bytes,
            graph_peak_bytes=self.peak_bytes,
            saved_bytes=self.point.saved_bytes,
            min_peak_bytes=min(self.least, self.field.frontier.min_peak_bytes),
            compute_us=sum(costs),
            measured_us=self.field.measured_us,
            extra_us=self.point.extra_us,
            overhead_us=self.outcome.overhead_us,
            bound_us=bound,
            decisions=_decisions(self.field, self.point),
            again=self.field.again,
            resident=dict(self.resident),
            prefetch_bytes=self.prefetch_bytes,
        )


@dataclass
class Search:
    """Searches one joint graph.

    Args:
        costs: times.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        budget_bytes: what forward, backward and residents may take; None for no bound.
        offset_bytes: what a compiler's code is known to need beyond its graphs.
        given: weights that stay gathered for other graphs, with their bytes.
        resident_room: what all residents may hold at most; None for no bound.
        fields: frontiers that were searched before.
    """

    costs: CostTable
    workspaces: WorkspaceTable
    budget_bytes: int | None
    offset_bytes: int = 0
    given: Mapping[str, int] = field(default_factory=dict)
    resident_room: int | None = None
    fields: Fields | None = None
    num_outcomes: int = 0
    """How many candidates were tried on copies of the graphs."""

    def run(self, task: Task) -> Found:
        """Return the best candidate; it may not fit if none does."""
        best = self._recomputing(self._field(task))
        if task.swap is not None and (not best.fits or best.point.extra_us > 0):
            for swapped, again in self._swaps(best.field):
                names = frozenset(each.node.name for each in swapped)
                other = self._recomputing(self._field(task.swap(names, again), swapped, again))
                best = _better(best, other)
        if best.field.task.verify is not None:
            for depth in (None, *best.field.task.depths):
                best = self._with_weights(best, depth)
        return best

    def _field(
        self,
        task: Task,
        swapped: tuple[Swapped, ...] = (),
        again: frozenset[str] = frozenset(),
    ) -> Field:
        known = None if self.fields is None or swapped else self.fields.get(task, self.costs)
        if known is not None:
            return known
        joint = task.joint
        self.workspaces.probe(joint.nodes)
        model = joint_model(joint, task.num_results, self.workspaces)
        may_drop = droppable(joint)
        indices = {i for i, node in enumerate(model.nodes) if node in may_drop}
        cost_us = [
            0.0 if model.is_input[i] else node_us(node, self.costs)
            for i, node in enumerate(model.nodes)
        ]
        trials = num_trials(len(model.nodes))
        found = frontier(model, indices, cost_us, max_simulations=trials)
        measured = sum(measured_us(node, self.costs) or 0.0 for node in model.nodes)
        made = Field(task, model, indices, cost_us, found, measured, swapped, again)
        if self.fields is not None and not swapped:
            self.fields.put(made, self.costs)
        return made

    def _allowed(self, resident: Mapping[str, int]) -> int | None:
        if self.budget_bytes is None:
            return None
        return self.budget_bytes - self.offset_bytes - sum(resident.values())

    def _recomputing(
        self,
        among: Field,
        resident: Mapping[str, int] | None = None,
        depth: int | None = None,
    ) -> Found:
        """Return the fastest plan of a frontier that fits as it will run, the smallest if none does.

        Passes behind the split change peaks little and in the same direction for all points, so the
        first one that fits is found by halving.
        """
        resident = self.given if resident is None else resident
        points, allowed = among.frontier.points, self._allowed(resident)
        outcomes: dict[int, Outcome] = {}

        def peak_of(at: int) -> int:
            if at not in outcomes:
                self.num_outcomes += 1
                trial = Trial(among.names(points[at]), frozenset(resident), depth)
                outcomes[at] = among.outcome(points[at], trial)
            return outcomes[at].peak_bytes

        def found(at: int) -> Found:
            least = min(each.peak_bytes for each in outcomes.values())
            return Found(among, at, outcomes[at], allowed, resident, depth, least)

        if allowed is None or peak_of(0) <= allowed:
            peak_of(0)
            return found(0)
        low, high = 0, len(points) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if peak_of(middle) <= allowed else (middle, high)
        peak_of(high)
        fitting = [at for at, each in outcomes.items() if each.peak_bytes <= allowed]
        return found(min(fitting) if fitting else min(outcomes, key=peak_of))

    def _swaps(self, base: Field) -> Iterator[tuple[tuple[Swapped, ...], frozenset[str]]]:
        """Yield sets of values to offload, and the values to compute again from them."""
        model, device = base.model, self.costs.device
        rate = min(device.d2h_bytes_per_s, device.h2d_bytes_per_s)
        again = _cheaper(base.frontier.points, _CHEAP * 1e6 / rate)
        left = crossing(model, base.may_drop, again.dropped)
        owner = movable(base.task.joint)
        waiting = []
        for index, size in left.items():
            node = model.nodes[index]
            if size >= base.task.swap_min_bytes and owner.get(node) is node:
                waiting.append(Swapped(node, size, base.cost_us[index]))
        # What is dear to make again for its size; of equals the first ones wait longest.
        waiting.sort(key=lambda each: -each.cost_us / max(each.num_bytes, 1))
        halves = [0.0, 0.0]
        for inside, us in zip(model.in_forward, base.cost_us, strict=True):
            halves[inside] += us
        capacity = rate * min(halves) / 1e6
        limits = [*(share * capacity for share in _SHARES), float("inf")]
        sizes = {_count_within(waiting, limit) for limit in limits} - {0}
        names = base.names(again)
        for size in sorted(sizes):
            yield tuple(waiting[:size]), names

    def _with_weights(self, best: Found, depth: int | None) -> Found:
        """Keep weights gathered, and gather others as far ahead as `depth`, where that is faster.

        Room for them is what is left, or what more recomputing makes.
        """
        among = best.field
        weights, most = among.task.weights, _most_outcomes(len(among.model.nodes))
        # A small gather costs more time for its bytes than a big one: latency.
        order = sorted(weights.keys() - self.given.keys(), key=lambda w: (weights[w], w))
        total = sum(weights[name] for name in order)
        counts = {len(list(_within(order, weights, share * total))) for share in _SHARES_OF_WEIGHTS}
        for count in sorted(counts):
            resident = {**self.given, **{name: weights[name] for name in order[:count]}}
            is_base = depth is None and not count
            is_idle = depth is not None and count == len(order)  # nothing is left to prefetch
            held = sum(resident.values())
            has_room = self.resident_room is None or held <= self.resident_room
            allowed = self._allowed(resident)
            if is_base or is_idle or not has_room or self.num_outcomes >= most:
                continue
            if best.fits and _least_us(among.frontier, allowed) >= best.added_us:
                continue  # the room would cost more than could be gained
            best = _better(best, self._recomputing(among, resident, depth))
        return best


def _most_outcomes(num_nodes: int) -> int:
    """Return how many candidates to try on copies: fewer of large graphs, to stay within seconds."""
    # Trying one takes about 0.7 ms for each node.
    return max(8, min(200, 9_000 // max(num_nodes, 1)))


def _least_us(found: Frontier, allowed: int | None) -> float:
    """Return the time of the fastest plan within a bound, before later passes add to its peak."""
    if allowed is None:
        return found.points[0].extra_us
    point = found.within(allowed)
    return float("inf") if point is None else point.extra_us


def _better(one: Found, other: Found) -> Found:
    """Return the candidate that is faster, or smaller where nothing fits; of equals the first."""
    best = other if other.rank < one.rank and _is_worth_it(one, other) else one
    return replace(best, least=min(one.least, other.least))


def _is_worth_it(one: Found, other: Found) -> bool:
    """Say whether a change gains more than rounding: a plan that does less is easier to trust."""
    if one.fits != other.fits or not one.fits:
        return True
    gain = one.added_us - other.added_us
    return gain > 1e-3 * sum(one.field.cost_us) or (
        gain >= 0 and other.total_bytes < one.total_bytes
    )


def _cheaper(points: Iterable[Point], price: float) -> Point:
    """Return the last plan on the way from fast to small that costs less per byte than a price."""
    chosen: Point | None = None
    for point in points:
        if chosen is not None:
            freed = chosen.peak_bytes - point.peak_bytes
            if point.extra_us - chosen.extra_us > price * freed:
                break
        chosen = point
    assert chosen is not None
    return chosen


def _count_within(waiting: list[Swapped], limit: float) -> int:
    used = 0
    for count, each in enumerate(waiting):
        used += each.num_bytes
        if used > limit:
            return count
    return len(waiting)


def _within(order: Iterable[str], sizes: Mapping[str, int], limit: float) -> Iterator[str]:
    used = 0
    for name in order:
        used += sizes[name]
        if used > limit * (1 + 1e-9):
            return
        yield name


def _decisions(among: Field, point: Point) -> tuple[Decision, ...]:
    """List what matters: values that could cross, the biggest first."""
    model, moved = among.model, {each.node.name for each in among.swapped}
    rows = [_decision(each.node, each.num_bytes, "offload", each.cost_us) for each in among.swapped]
    for index in among.may_drop:
        node = model.nodes[index]
        if node.name not in moved:
            size = sum(model.sizes[storage] for storage in model.fresh[index])
            action = "recompute" if index in point.dropped else "keep"
            rows.append(_decision(node, size, action, among.cost_us[index]))
    return tuple(sorted(rows, key=lambda row: (-row.num_bytes, row.value)))


def _decision(node: fx.Node, num_bytes: int, action: str, cost_us: float) -> Decision:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return Decision(
        value=node.name,
        op=str(node.target).removeprefix("aten."),
        num_bytes=num_bytes,
        action=action,
        cost_us=round(cost_us, 3),
        where=_ROOT.sub("", paths[-1]) if paths else "",
    )
