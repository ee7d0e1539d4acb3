"""In which order the values of a unit are dropped from memory, and what computing each again costs.

Starting from all that backward reads, the value that costs least time per byte is dropped next, over
and over. The lower hull of the points on this way is the unit's offer to the search.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchloom.memory.joint import JointModel
from torchloom.plan.units import Segment, Unit


@dataclass(frozen=True, slots=True)
class Drop:
    """One more step to empty a unit: the values to drop, the bytes that frees and the time it adds."""

    values: tuple[int, ...]
    """Offsets into the nodes of the unit or segment, so that equal ones share the steps."""
    freed_bytes: int
    cost_us: float

    @property
    def us_per_byte(self) -> float:
        """Its price."""
        return self.cost_us / max(self.freed_bytes, 1)


@dataclass(frozen=True, slots=True)
class UnitSteps:
    """The steps that empty the units of one model; equal units are looked at once.

    Args:
        model: the graph.
        kept: values that backward reads, all of which forward would hand over; by their makers,
            with the bytes of those that are read.
        may_drop: values that may be computed again.
        cost_us: time of each node.
    """

    model: JointModel
    kept: Mapping[int, int]
    may_drop: Collection[int]
    cost_us: Sequence[float]

    def of(self, units: Sequence[Unit]) -> list[list[Drop]]:
        """Return the steps that empty each unit, the cheapest per byte first.

        Within a segment, values are dropped that what is kept around them gives back. The last step
        drops the rest of the unit, what its segments pass on to each other included.
        """
        by_segment: dict[int, _Emptied] = {}
        by_unit: dict[tuple[int, ...], list[Drop]] = {}
        found = []
        for unit in units:
            if unit.kind not in by_unit:
                by_unit[unit.kind] = self._drops(unit, by_segment)
            found.append(by_unit[unit.kind])
        return found

    def _drops(self, unit: Unit, by_segment: dict[int, _Emptied]) -> list[Drop]:
        steps: list[Drop] = []
        again: set[int] = set()
        gone: set[int] = set()
        offset = 0
        for segment in unit.segments:
            if segment.kind not in by_segment:
                by_segment[segment.kind] = _Emptying(self, segment, unit).all_steps()
            emptied = by_segment[segment.kind]
            for step in emptied.steps:
                values = tuple(offset + at for at in step.values)
                steps.append(Drop(values, step.freed_bytes, step.cost_us))
                gone |= {segment.nodes[at] for at in step.values}
            again |= {segment.nodes[at] for at in emptied.again}
            offset += len(segment.nodes)
        steps.sort(key=lambda step: step.us_per_byte)
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
        new, entered_bytes = [], 0
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
                    entered_bytes += _own_bytes(self.model, used)
        freed_bytes = sum(self.kept[index] for index in wanted) - entered_bytes
        if freed_bytes <= 0:
            return None
        place = {index: at for at, index in enumerate(nodes)}
        cost_us = sum(self.cost_us[index] for index in sorted(new))
        return Drop(tuple(place[index] for index in wanted), freed_bytes, cost_us)


class _DroppableValue(NamedTuple):
    """A value that could be dropped next; of several the smallest is."""

    us_per_byte: float
    index: int
    freed_bytes: float
    cost_us: float
    again: frozenset[int]
    """What must run again to get it."""


class _Emptied(NamedTuple):
    """A segment without what can be dropped in it, by offsets into its nodes."""

    steps: list[Drop]
    again: frozenset[int]


class _Emptying:
    """A segment on its way from all kept to all dropped.

    What a drop costs depends on what was dropped before, near it: only those candidates are looked
    at again.
    """

    def __init__(self, unit_steps: UnitSteps, segment: Segment, unit: Unit) -> None:
        self._model, self._kept = unit_steps.model, unit_steps.kept
        self._may_drop, self._cost_us = unit_steps.may_drop, unit_steps.cost_us
        self._segment = segment
        self._inside = frozenset(segment.nodes)
        self._first_of_unit = unit.segments[0].nodes[0]
        self._held = {index for index in segment.nodes if index in self._kept}
        self._again: set[int] = set()
        self._open: dict[int, _DroppableValue] = {}
        self._readers: defaultdict[int, set[int]] = defaultdict(set)
        for index in segment.nodes:
            if index in self._held and index in self._may_drop and index not in segment.passes_on:
                self._price(index)

    def all_steps(self) -> _Emptied:
        """Drop one value after the other, the cheapest per byte first, until none frees anything."""
        place = {index: at for at, index in enumerate(self._segment.nodes)}
        steps = []
        while self._open and (best := min(self._open.values())).us_per_byte < float("inf"):
            steps.append(Drop((place[best.index],), int(best.freed_bytes), best.cost_us))
            del self._open[best.index]
            self._held.discard(best.index)
            self._again |= best.again
            concerned = {r for node in (best.index, *best.again) for r in self._readers[node]}
            for index in concerned & self._open.keys():
                self._price(index)
        return _Emptied(steps, frozenset(place[index] for index in self._again))

    def _price(self, index: int) -> None:
        again, entered_bytes, met = self._closure(index)
        freed_bytes = self._kept[index] - entered_bytes
        cost_us = sum(self._cost_us[each] for each in sorted(again))
        us_per_byte = cost_us / freed_bytes if freed_bytes > 0 else float("inf")
        self._open[index] = _DroppableValue(
            us_per_byte, index, freed_bytes, cost_us, frozenset(again)
        )
        for node in met:
            self._readers[node].add(index)

    def _closure(self, start: int) -> tuple[set[int], float, set[int]]:
        """Return what must run again, bytes that must be saved for it, and all nodes looked at."""
        model = self._model
        waiting, found, entered_bytes, met = [start], {start}, 0.0, {start}
        while waiting:
            for used in model.inputs[waiting.pop()]:
                if used in met:
                    continue
                if used not in self._inside:
                    if used >= self._first_of_unit and not self._is_given(used):
                        entered_bytes = float("inf")  # an earlier segment would have to run as well
                    continue
                met.add(used)
                maker = model.maker[used]
                if used in self._again or (maker in self._held and maker != start):
                    met.add(maker)
                elif used in self._may_drop or not model.fresh[used]:
                    found.add(used)
                    waiting.append(used)
                else:
                    entered_bytes += _own_bytes(model, used)
        return found, entered_bytes, met

    def _is_given(self, index: int) -> bool:
        """Say whether a value from before the segment is there in backward, whatever is dropped."""
        return self._model.is_input[index] or self._model.maker[index] in self._kept


def _own_bytes(model: JointModel, index: int) -> int:
    return sum(model.sizes[storage] for storage in model.fresh[index])


def in_two(steps: Sequence[Drop]) -> list[Drop]:
    """Merge the steps of a unit to two at most, which makes three choices: nothing, all, and one between.

    That between is where the bytes that are freed stop being cheap: farthest from the line that leads from
    nothing to all (Satopaa et al., "Finding a 'Kneedle' in a Haystack", ICDCS workshops 2011).

    Args:
        steps: the cheapest per byte first.
    """
    if len(steps) <= 2:
        return list(steps)
    ends_bytes = list(itertools.accumulate(step.freed_bytes for step in steps))
    ends_us = list(itertools.accumulate(step.cost_us for step in steps))
    knee = max(
        range(len(steps) - 1),
        key=lambda at: (
            ends_bytes[at] / max(ends_bytes[-1], 1) - ends_us[at] / max(ends_us[-1], 1e-9)
        ),
    )
    return [_merged(steps[: knee + 1]), _merged(steps[knee + 1 :])]


def _merged(steps: Sequence[Drop]) -> Drop:
    return Drop(
        tuple(value for step in steps for value in step.values),
        sum(step.freed_bytes for step in steps),
        sum(step.cost_us for step in steps),
    )


def _hull(steps: Sequence[Drop]) -> list[Drop]:
    """Merge steps until each costs more per byte than the one before it."""
    merged: list[Drop] = []
    for step in steps:
        current = step
        while merged and merged[-1].us_per_byte >= current.us_per_byte:
            current = _merged([merged.pop(), current])
        merged.append(current)
    return merged
