"""Cut the forward half of a graph into units, such as layers: between two of them little is alive.

A decoder has such a place after each residual addition. What is alive there is all that a unit
needs to be computed again, so units can be planned one by one. Equal units (the layers of a model)
are found by their shape and planned once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from torchloom.memory.joint import JointModel

_SLACK = 1.05
"""A place counts as narrow up to this multiple of the narrowest."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Forward nodes between two narrow places."""

    nodes: tuple[int, ...]
    """Indices of its calls, in order."""
    passes_on: frozenset[int]
    """Nodes whose values later calls of forward read."""
    kind: int
    """Equal for segments of equal shape that stand alike in their units."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Segments that are computed again together: what they pass among themselves is not saved."""

    segments: tuple[Segment, ...]
    """Its parts between narrow places."""
    passes_on: frozenset[int]
    """Nodes whose values later units read: saved when those are computed again."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """Indices of its calls, in order."""
        return tuple(index for segment in self.segments for index in segment.nodes)

    @property
    def kind(self) -> tuple[int, ...]:
        """Equal for units of equal shape."""
        return tuple(segment.kind for segment in self.segments)


class Cuts:
    """The forward half in order, and the places where it can be cut because little is alive.

    Args:
        model: the graph.
    """

    def __init__(self, model: JointModel) -> None:
        self.model = model
        self._order, self._last_reader = _order_of(model)
        self.places = tuple(_narrow_places(model, self._order))
        """Positions in the order of calls before which little is alive."""
        known: dict[tuple[str, str], int] = {}
        self._forms = [known.setdefault(_form(node), len(known)) for node in model.nodes]
        """By index: equal for nodes with equal operators and shapes."""

    def units(self, group: int = 1) -> list[Unit]:
        """Return the units, each of `group` segments."""
        bounds = [0, *self.places, len(self._order)]
        spans = [tuple(self._order[a:b]) for a, b in itertools.pairwise(bounds) if a < b]
        kinds: dict[tuple[object, ...], int] = {}
        found = []
        for start in range(0, len(spans), group):
            members = spans[start : start + group]
            first, last = members[0][0], members[-1][-1]
            segments = []
            for span in members:
                kind = kinds.setdefault(self._shape(span, first, last), len(kinds))
                passes_on = frozenset(i for i in span if self._last_reader[i] > span[-1])
                segments.append(Segment(span, passes_on, kind))
            leaving = (
                i for segment in segments for i in segment.passes_on if self._last_reader[i] > last
            )
            found.append(Unit(tuple(segments), frozenset(leaving)))
        return found

    def _shape(self, span: Sequence[int], first: int, last: int) -> tuple[object, ...]:
        """Return what two segments must share to be planned alike, in a unit from `first` to `last`."""
        start, end = span[0], span[-1]
        rows: list[object] = []
        for index in span:
            reader = self._last_reader[index]
            links = (
                used - start if used >= start else -1 - (used >= first)
                for used in self.model.inputs[index]
            )
            rows.append((self._forms[index], (reader > end) + (reader > last), *links))
        return tuple(rows)


def _order_of(model: JointModel) -> tuple[list[int], list[int]]:
    """Return the calls of the forward half, and by index the last of them that reads a node, -1 if none does."""
    order = [i for i, inside in enumerate(model.in_forward) if inside and not model.is_input[i]]
    last_reader = [-1] * len(model.nodes)
    for index in order:
        for used in model.inputs[index]:
            last_reader[used] = index
    return order, last_reader


def units_of_parts(model: JointModel, kinds: Mapping[int, tuple[int, str]]) -> list[Unit]:
    """Return given parts of the forward half as units, and what lies between them.

    Args:
        model: the graph.
        kinds: by the index of a node of a part, the number of the part and its kind: equal ones do the same.
    """
    order, last_reader = _order_of(model)
    numbers: dict[object, int] = {}
    found = []
    for part, run in itertools.groupby(order, key=kinds.get):
        nodes = tuple(run)
        kind = nodes[0] if part is None else part[1]
        passes_on = frozenset(i for i in nodes if last_reader[i] > nodes[-1])
        segment = Segment(nodes, passes_on, numbers.setdefault(kind, len(numbers)))
        found.append(Unit((segment,), passes_on))
    return found


def _form(node: fx.Node) -> tuple[str, str]:
    value = node.meta.get("val")
    form = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)
    return str(node.target) if node.op == "call_function" else node.op, str(form)


def _narrow_places(model: JointModel, order: Sequence[int]) -> list[int]:
    """Return positions in `order` before which little is alive, one for each narrow stretch."""
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, index in enumerate(order):
        for storage in model.fresh[index]:
            born.setdefault(storage, place)
        for used in model.inputs[index]:
            last.update(dict.fromkeys(model.touched[used], place))
    change = [0] * (len(order) + 1)
    for storage, start in born.items():
        change[start + 1] += model.sizes[storage]
        change[last.get(storage, start) + 1] -= model.sizes[storage]
    widths = list(itertools.accumulate(change))
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
