"""The frontier of a graph: plans from fast and big to slow and small, each simulated exactly.

The units' steps are taken in the order of their price (the Lagrangian relaxation of a
multiple-choice knapsack: Sinha and Zoltners, "The Multiple-Choice Knapsack Problem", Operations
Research 27(3), 1979), for several sizes of units. What is tried does not depend on a budget, so a
smaller budget can only select a smaller plan.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchloom.memory.joint import JointModel, Peaks
from torchloom.plan.unit_steps import Drop, UnitSteps, in_two
from torchloom.plan.units import Cuts, Unit, units_of_parts

_GROUPS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of segments that make one unit."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One choice of values to recompute, with its simulated peak and the time that it adds."""

    dropped: frozenset[int]
    """Nodes whose values do not cross from forward to backward."""
    peak_bytes: int
    saved_bytes: int
    extra_us: float
    """Time of what backward runs again."""


class MemorySource(NamedTuple):
    """A way to free memory other than recomputation: its price and how far it goes."""

    us_per_byte: float
    """Microseconds that the step loses per byte that is freed."""
    num_bytes: float
    """What it can free at most."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """Points in the order of their time; each later one needs less memory."""

    points: tuple[FrontierPoint, ...]
    hull: tuple[Drop, ...]
    """Steps of the finest units by price, for the bound."""
    num_tried: int

    @property
    def min_peak_bytes(self) -> int:
        """The least that any plan needs."""
        return min(point.peak_bytes for point in self.points)

    def within(self, budget_bytes: int) -> FrontierPoint | None:
        """Return the fastest plan whose peak is at most the budget, None if none is."""
        return next((p for p in self.points if p.peak_bytes <= budget_bytes), None)

    @property
    def beside_bytes(self) -> int:
        """The least that any plan needs at its peak beside what it saves."""
        return min(point.peak_bytes - point.saved_bytes for point in self.points)

    def bound_us(
        self,
        budget_bytes: int,
        beside_bytes: int | None = None,
        sources: Sequence[MemorySource] = (),
    ) -> float:
        """Return a time that no plan of this family can beat within the budget.

        A plan's peak is at least its saved bytes and the least that any plan needs beside them; the
        cheapest way to free the difference, fractions of steps allowed, costs this much.

        Args:
            budget_bytes: what the peak may be.
            beside_bytes: the least that is needed beside what is saved, if plans of other forms of
                the graph count as well; of this frontier's plans by default.
            sources: other ways to free memory.
        """
        beside = self.beside_bytes if beside_bytes is None else beside_bytes
        needed_bytes = float(self.points[0].saved_bytes + beside - budget_bytes)
        ways = [(step.us_per_byte, float(step.freed_bytes)) for step in self.hull]
        ways += sources
        spent_us = 0.0
        for us_per_byte, freed_bytes in sorted(ways):
            if needed_bytes <= 0:
                break
            spent_us += us_per_byte * min(freed_bytes, needed_bytes)
            needed_bytes -= freed_bytes
        return spent_us


def frontier(
    model: JointModel,
    may_drop: Collection[int],
    cost_us: Sequence[float],
    *,
    max_simulations: int = 160,
    parts: Mapping[int, tuple[int, str]] | None = None,
) -> Frontier:
    """Find the frontier of a joint graph.

    Args:
        model: the graph.
        may_drop: indices of values that may be computed again.
        cost_us: time of each node, by index.
        max_simulations: how many plans are simulated at most.
        parts: see `units_of_parts`. About equal ones at most three different choices are made.
    """
    rule = CrossingRule(model, may_drop)
    kept = rule.kept()
    unit_steps = UnitSteps(model, kept, may_drop, cost_us)
    orders = _order_of_parts(unit_steps, parts) if parts else _orders_of_groups(unit_steps)
    share = max(2, max_simulations // max(1, sum(1 for each in orders.values() if each.steps)))
    points: list[FrontierPoint] = []
    for order in orders.values():
        for count in _spread(order.steps, share):
            dropped = frozenset(order.base.union(*(values for values, _ in order.steps[:count])))
            found = rule.peaks(dropped)
            extra_us = sum(cost_us[i] for i in found.recomputed)
            points.append(FrontierPoint(dropped, found.peak_bytes, found.saved_bytes, extra_us))
    hull = tuple(sorted((drop for _, drop in orders[1].steps), key=lambda drop: drop.us_per_byte))
    return Frontier(_pareto(points), hull, len(points))


class CrossingRule:
    """Which values do not cross from forward to backward: views, constants, what is tagged so, and what a plan drops.

    Args:
        model: the graph.
        may_drop: indices of values that may be computed again.
    """

    def __init__(self, model: JointModel, may_drop: Collection[int]) -> None:
        self._model = model
        constants = {i for i in may_drop if not model.inputs[i]}
        views = {
            i
            for i, inside in enumerate(model.in_forward)
            if inside and not model.fresh[i] and model.maker[i] == i
        }
        self._always = constants | views | model.fixed

    def peaks(self, dropped: Collection[int]) -> Peaks:
        """Return the peaks under a plan that computes some values again, and what backward then runs again."""
        return self._model.simulate(self._under(dropped))

    def _under(self, dropped: Collection[int]) -> Callable[[int], bool]:
        """Return the rule under a plan; a pick of several results follows its maker."""
        maker, always = self._model.maker, self._always
        return lambda i: i in always or maker[i] in dropped or maker[i] in always

    def kept(self, dropped: Collection[int] = ()) -> dict[int, int]:
        """Return what forward hands to backward under a plan: bytes by the index of the maker."""
        found: dict[int, int] = {}
        for index in self._model.saved(self._under(dropped)):
            size = sum(self._model.sizes[s] for s in self._model.touched[index])
            maker = self._model.maker[index]
            found[maker] = found.get(maker, 0) + size
        return found


@dataclass(frozen=True, slots=True)
class _DropOrder:
    base: frozenset[int]
    """Values that backward does not read itself: dropped whatever else is."""
    steps: tuple[tuple[frozenset[int], Drop], ...]


def _orders_of_groups(unit_steps: UnitSteps) -> dict[int, _DropOrder]:
    """Return orders of drops by how many segments make a unit."""
    cuts = Cuts(unit_steps.model)
    groups = [each for each in _GROUPS if each <= max(1, len(cuts.places) // 2 + 1)]
    by_group = {group: cuts.units(group) for group in groups}
    return {
        g: _drop_order(units, unit_steps.of(units), unit_steps) for g, units in by_group.items()
    }


def _order_of_parts(
    unit_steps: UnitSteps, parts: Mapping[int, tuple[int, str]]
) -> dict[int, _DropOrder]:
    """Return the one order in which parts and what lies between them are units."""
    units = units_of_parts(unit_steps.model, parts)
    drops = [
        in_two(steps) if unit.nodes[0] in parts else steps
        for unit, steps in zip(units, unit_steps.of(units), strict=True)
    ]
    return {1: _drop_order(units, drops, unit_steps)}


def _drop_order(
    units: Sequence[Unit], drops_of_units: Sequence[Sequence[Drop]], unit_steps: UnitSteps
) -> _DropOrder:
    steps = []
    for number, (unit, drops) in enumerate(zip(units, drops_of_units, strict=True)):
        nodes = unit.nodes
        for drop in drops:
            values = frozenset(nodes[offset] for offset in drop.values)
            steps.append((drop.us_per_byte, number, values, drop))
    # Of equal prices the earlier unit first: its values wait longest.
    steps.sort(key=lambda each: (each[0], each[1]))
    borders = {i for unit in units for i in unit.passes_on}
    base = frozenset(
        i for i in unit_steps.may_drop if i not in unit_steps.kept and i not in borders
    )
    return _DropOrder(base, tuple((values, drop) for _, _, values, drop in steps))


def _spread(steps: Sequence[tuple[frozenset[int], Drop]], most: int) -> list[int]:
    """Return how many steps to take in each trial, evenly over the bytes that they free."""
    if len(steps) < most:
        return list(range(len(steps) + 1))
    freed_bytes, running = [], 0
    for _, drop in steps:
        running += drop.freed_bytes
        freed_bytes.append(running)
    wanted = (running * k / (most - 1) for k in range(most))
    return sorted({0, len(steps), *(bisect.bisect_left(freed_bytes, each) for each in wanted)})


def _pareto(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Keep plans that no other one beats in both time and memory, the fastest first."""
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.extra_us, p.peak_bytes)):
        if not kept or point.peak_bytes < kept[-1].peak_bytes:
            kept.append(point)
    return tuple(kept)
