"""How far a unit can be emptied, and what each step costs.

Starting from all that backward reads, the value that costs least time per byte is dropped next, over
and over. The lower hull of the points on this way is the unit's offer to the search.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchloom.plan.frontier.units import Unit
from torchloom.plan.memory.joint import JointModel


@dataclass(frozen=True, slots=True)
class Drop:
    """One more step of a unit: drop these values."""

    values: tuple[int, ...]
    """Offsets into the unit's nodes, so that equal units share the steps."""
    freed_bytes: int
    cost_us: float

    @property
    def price(self) -> float:
        """Microseconds per byte."""
        return self.cost_us / max(self.freed_bytes, 1)


def drops_of(
    model: JointModel,
    unit: Unit,
    kept: Mapping[int, int],
    may_drop: Collection[int],
    cost_us: Sequence[float],
) -> list[Drop]:
    """Return the steps that empty a unit, the cheapest per byte first.

    Args:
        model: the graph.
        unit: which nodes.
        kept: values that backward reads, all of which forward would hand over; by their makers,
            with the bytes of those that are read.
        may_drop: values that may be computed again.
        cost_us: time of each node.
    """
    place = {index: offset for offset, index in enumerate(unit.nodes)}
    held = {index for index in unit.nodes if index in kept}
    open_to_drop = [
        i for i in unit.nodes if i in held and i in may_drop and i not in unit.passes_on
    ]
    again: set[int] = set()
    steps: list[Drop] = []
    while open_to_drop:
        best, best_closure, best_price, best_bytes = -1, set(), float("inf"), 0
        for index in open_to_drop:
            closure, entered = _closure(model, index, place, held, again, may_drop, unit)
            freed = kept[index] - sum(_own_bytes(model, each) for each in entered)
            cost = sum(cost_us[each] for each in closure)
            price = cost / freed if freed > 0 else float("inf")
            if price < best_price:
                best, best_closure, best_price, best_bytes = index, closure, price, freed
        if best < 0:
            break
        held.discard(best)
        open_to_drop.remove(best)
        again |= best_closure
        cost = sum(cost_us[each] for each in best_closure)
        steps.append(Drop((place[best],), best_bytes, cost))
    return _hull(steps)


def _closure(
    model: JointModel,
    start: int,
    place: dict[int, int],
    held: set[int],
    again: set[int],
    may_drop: Collection[int],
    unit: Unit,
) -> tuple[set[int], set[int]]:
    """Return what must run again to get a value, and values of the unit that must be saved for it."""
    waiting, found, entered = [start], {start}, set()
    while waiting:
        for used in model.inputs[waiting.pop()]:
            maker = model.maker[used]
            if used in found or used not in place or used in again:
                continue
            if maker in held and maker != start:
                continue
            if used in may_drop or not model.fresh[used]:
                found.add(used)
                waiting.append(used)
            else:
                entered.add(used)
    return found, entered


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
