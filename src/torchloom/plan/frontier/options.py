"""How far a unit can be emptied, and what each step costs.

Starting from all that backward reads, the value that costs least time per byte is dropped next, over
and over. The lower hull of the points on this way is the unit's offer to the search.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchloom.memory.joint import JointModel
from torchloom.plan.frontier.units import Run, Unit


@dataclass(frozen=True, slots=True)
class Drop:
    """One more step of a unit: drop these values."""

    values: tuple[int, ...]
    """Offsets into the nodes of the unit or run, so that equal ones share the steps."""
    freed_bytes: int
    cost_us: float

    @property
    def price(self) -> float:
        """Microseconds per byte."""
        return self.cost_us / max(self.freed_bytes, 1)


class Offers:
    """What the units of one model offer; equal ones are looked at once.

    Args:
        model: the graph.
        kept: values that backward reads, all of which forward would hand over; by their makers,
            with the bytes of those that are read.
        may_drop: values that may be computed again.
        cost_us: time of each node.
    """

    def __init__(
        self,
        model: JointModel,
        kept: Mapping[int, int],
        may_drop: Collection[int],
        cost_us: Sequence[float],
    ) -> None:
        self.model, self.kept, self.may_drop, self.cost_us = model, kept, may_drop, cost_us

    def of(self, units: Sequence[Unit]) -> list[list[Drop]]:
        """Return the steps that empty each unit, the cheapest per byte first.

        Within a run, values are dropped that what is kept around them gives back. The last step
        drops the rest of the unit, what its runs pass on to each other included.
        """
        by_run: dict[int, _Emptied] = {}
        by_unit: dict[tuple[int, ...], list[Drop]] = {}
        found = []
        for unit in units:
            if unit.kind not in by_unit:
                by_unit[unit.kind] = self._drops(unit, by_run)
            found.append(by_unit[unit.kind])
        return found

    def _drops(self, unit: Unit, by_run: dict[int, _Emptied]) -> list[Drop]:
        steps: list[Drop] = []
        again: set[int] = set()
        gone: set[int] = set()
        offset = 0
        for run in unit.runs:
            if run.kind not in by_run:
                by_run[run.kind] = _Emptying(self, run, unit).all_steps()
            emptied = by_run[run.kind]
            for step in emptied.steps:
                values = tuple(offset + at for at in step.values)
                steps.append(Drop(values, step.freed_bytes, step.cost_us))
                gone |= {run.nodes[at] for at in step.values}
            again |= {run.nodes[at] for at in emptied.again}
            offset += len(run.nodes)
        steps.sort(key=lambda step: step.price)
        rest = self._rest(unit, again, gone)
        return _hull([*steps, rest] if rest is not None else steps)

    def _rest(self, unit: Unit, again: set[int], gone: set[int]) -> Drop | None:
        """Return the step that drops all that is still kept, None if it frees nothing."""
        nodes = unit.nodes
        inside = frozenset(nodes)
        wanted = [
            i
            for i in nodes
            if i in self.kept and i in self.may_drop and i not in unit.passes_on and i not in gone
        ]
        stays = {i for i in nodes if i in self.kept and i not in gone} - set(wanted)
        waiting, seen = list(wanted), set(wanted)
        new, entered = [], 0
        while waiting:
            index = waiting.pop()
            if index not in again:
                new.append(index)
            for used in self.model.inputs[index]:
                if used in seen or used not in inside:
                    continue
                seen.add(used)
                if used in again or self.model.maker[used] in stays:
                    continue
                if used in unit.passes_on:
                    continue  # saved, as later units start from it
                if used in self.may_drop or not self.model.fresh[used]:
                    waiting.append(used)
                else:
                    entered += _own_bytes(self.model, used)
        freed = sum(self.kept[index] for index in wanted) - entered
        if freed <= 0:
            return None
        place = {index: at for at, index in enumerate(nodes)}
        cost = sum(self.cost_us[index] for index in sorted(new))
        return Drop(tuple(place[index] for index in wanted), freed, cost)


class _Candidate(NamedTuple):
    """A value that could be dropped next."""

    price: float
    index: int
    freed_bytes: float
    cost_us: float
    again: frozenset[int]
    """What must run again to get it."""


class _Emptied(NamedTuple):
    """A run without what can be dropped in it, by offsets into its nodes."""

    steps: list[Drop]
    again: frozenset[int]


class _Emptying:
    """A run on its way from all kept to all dropped.

    What a drop costs depends on what was dropped before, near it: only those candidates are looked
    at again.
    """

    def __init__(self, offers: Offers, run: Run, unit: Unit) -> None:
        self._model, self._kept = offers.model, offers.kept
        self._may_drop, self._cost_us = offers.may_drop, offers.cost_us
        self._run = run
        self._inside = frozenset(run.nodes)
        self._first_of_unit = unit.runs[0].nodes[0]
        self._held = {index for index in run.nodes if index in self._kept}
        self._again: set[int] = set()
        self._open: dict[int, _Candidate] = {}
        self._readers: defaultdict[int, set[int]] = defaultdict(set)
        self._queue: list[tuple[float, int]] = []
        for index in run.nodes:
            if index in self._held and index in self._may_drop and index not in run.passes_on:
                self._look_at(index)

    def all_steps(self) -> _Emptied:
        """Drop one value after the other, the cheapest per byte first."""
        place = {index: at for at, index in enumerate(self._run.nodes)}
        steps = []
        while (best := self.cheapest()) is not None:
            steps.append(Drop((place[best.index],), int(best.freed_bytes), best.cost_us))
            self.drop(best)
        return _Emptied(steps, frozenset(place[index] for index in self._again))

    def cheapest(self) -> _Candidate | None:
        """Return the value that costs least per byte, None when none frees anything."""
        while self._queue:
            price, index = self._queue[0]
            found = self._open.get(index)
            if found is not None and found.price == price:
                return found if price < float("inf") else None
            heapq.heappop(self._queue)  # outdated
        return None

    def drop(self, chosen: _Candidate) -> None:
        """Drop a value."""
        del self._open[chosen.index]
        self._held.discard(chosen.index)
        self._again |= chosen.again
        changed = {chosen.index, *chosen.again}
        concerned = {r for node in changed for r in self._readers[node]}
        for index in sorted(concerned & self._open.keys()):
            self._look_at(index)

    def _look_at(self, index: int) -> None:
        again, entered, met = self._closure(index)
        freed = self._kept[index] - entered
        cost = sum(self._cost_us[each] for each in sorted(again))
        price = cost / freed if freed > 0 else float("inf")
        self._open[index] = _Candidate(price, index, freed, cost, frozenset(again))
        for node in met:
            self._readers[node].add(index)
        heapq.heappush(self._queue, (price, index))

    def _closure(self, start: int) -> tuple[set[int], float, set[int]]:
        """Return what must run again, bytes that must be saved for it, and all nodes looked at."""
        model = self._model
        waiting, found, entered, met = [start], {start}, 0.0, {start}
        while waiting:
            for used in model.inputs[waiting.pop()]:
                if used in met:
                    continue
                if used not in self._inside:
                    if used >= self._first_of_unit and not self._is_given(used):
                        entered = float("inf")  # an earlier run would have to run as well
                    continue
                met.add(used)
                maker = model.maker[used]
                if used in self._again or (maker in self._held and maker != start):
                    met.add(maker)
                elif used in self._may_drop or not model.fresh[used]:
                    found.add(used)
                    waiting.append(used)
                else:
                    entered += _own_bytes(model, used)
        return found, entered, met

    def _is_given(self, index: int) -> bool:
        """Say whether a value from before the run is there in backward, whatever is dropped."""
        return self._model.is_input[index] or self._model.maker[index] in self._kept


def _own_bytes(model: JointModel, index: int) -> int:
    return sum(model.sizes[storage] for storage in model.fresh[index])


def _hull(steps: Sequence[Drop]) -> list[Drop]:
    """Merge steps until each costs more per byte than the one before it."""
    merged: list[Drop] = []
    for step in steps:
        current = step
        while merged and merged[-1].price >= current.price:
            last = merged.pop()
            current = Drop(
                last.values + current.values,
                last.freed_bytes + current.freed_bytes,
                last.cost_us + current.cost_us,
            )
        merged.append(current)
    return merged
