"""Cutting the forward half into units: between two of them little is alive.

A decoder has such a place after each residual addition. What is alive there is all that a unit
needs to be computed again, so units can be planned one by one. Equal units (the layers of a model)
are found by their shape and planned once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchloom.plan.memory.joint import JointModel

_SLACK = 1.05
"""A place counts as narrow up to this multiple of the narrowest."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of forward nodes."""

    nodes: tuple[int, ...]
    """Indices of its calls, in order."""
    passes_on: frozenset[int]
    """Nodes whose values later units read: saved when those are computed again."""
    kind: int
    """Equal for units of equal shape."""


def units_of(model: JointModel, group: int = 1) -> list[Unit]:
    """Return the units, each of `group` runs between narrow places."""
    order = [i for i, inside in enumerate(model.in_forward) if inside and not model.is_input[i]]
    cuts = _narrow_places(model, order)[group - 1 :: group]
    bounds = [0, *cuts, len(order)]
    pieces = [order[a:b] for a, b in itertools.pairwise(bounds) if a < b]
    kinds: dict[tuple[object, ...], int] = {}
    found = []
    for piece in pieces:
        shape = _shape(model, piece)
        kind = kinds.setdefault(shape, len(kinds))
        found.append(Unit(tuple(piece), _passed_on(model, piece), kind))
    return found


def num_places(model: JointModel) -> int:
    """Return how many narrow places there are."""
    order = [i for i, inside in enumerate(model.in_forward) if inside and not model.is_input[i]]
    return len(_narrow_places(model, order))


def _narrow_places(model: JointModel, order: Sequence[int]) -> list[int]:
    """Return positions in `order` before which little is alive, one for each narrow stretch."""
    last: dict[int, int] = {}
    for place, index in enumerate(order):
        for used in model.inputs[index]:
            for storage in model.touched[used]:
                last[storage] = place
    born: dict[int, int] = {}
    for place, index in enumerate(order):
        for storage in model.fresh[index]:
            born.setdefault(storage, place)
    change = [0] * (len(order) + 1)
    for storage, start in born.items():
        end = last.get(storage, start)
        change[start + 1] += model.sizes[storage]
        change[end + 1] -= model.sizes[storage]
    alive, widths = 0, []
    for each in change:
        alive += each
        widths.append(alive)
    inner = [w for w in widths[1:-1] if w > 0]
    if not inner:
        return []
    # The narrowest place of all may be a scalar at the end: half of the median is the yardstick.
    typical = sorted(inner)[len(inner) // 2]
    usual = [w for w in inner if w >= typical / 8]
    limit = _SLACK * min(usual, default=0)
    found, was_narrow = [], True
    for place in range(1, len(order)):
        is_narrow = 0 < widths[place] <= limit
        if is_narrow and not was_narrow:
            found.append(place)
        was_narrow = is_narrow
    return found


def _passed_on(model: JointModel, piece: Sequence[int]) -> frozenset[int]:
    inside = set(piece)
    position = {node: index for index, node in enumerate(model.nodes)}
    return frozenset(
        i
        for i in piece
        if any(
            model.in_forward[position[user]] and position[user] not in inside
            for user in model.nodes[i].users
            if user in position
        )
    )


def _shape(model: JointModel, piece: Sequence[int]) -> tuple[object, ...]:
    """Return what two units must share to be planned alike."""
    first = piece[0]
    inside = set(piece)
    rows: list[object] = []
    for index in piece:
        node = model.nodes[index]
        value = node.meta.get("val")
        form = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else str(type(value))
        links = tuple(used - first if used in inside else -1 for used in model.inputs[index])
        rows.append((str(node.target), str(form), links))
    return tuple(rows)
