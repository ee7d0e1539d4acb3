"""What to try next: combinations of uses of memory, by what is expected of them.

What a use is worth is learned from trials of it alone. What several are worth together is expected to
be their sum, until a trial of them says otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchloom.costs import CostTable, link_us
from torchloom.plan.field import Field
from torchloom.plan.frontier import Point
from torchloom.plan.task import CONFIGURED, Beside, Flight, Outcome

_SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
"""Of all weights: how many stay gathered in a candidate. Of all pieces: how many on the device."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidate:
    """A form of the graph, what lives on beside it, and how much of its transfers is in flight."""

    form: Field
    beside: Beside = field(default_factory=Beside)
    flight: Flight = CONFIGURED
    kept: float = 0.0
    """Of the time of all gathers, the part whose weights stay."""
    held: float = 0.0
    """Of the time of all copies of pieces, the part that is saved."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal candidates of a search."""
        return *self.gathers, self.held

    @property
    def gathers(self) -> tuple[object, ...]:
        """What it decides about the form and its gathers."""
        return id(self.form), self.flight, self.kept

    @property
    def num_uses(self) -> int:
        """How many things it decides otherwise than the graph as it is, with nothing beside it."""
        is_moved = bool(self.form.move.swapped)
        return is_moved + (self.flight != CONFIGURED) + (self.kept > 0) + (self.held > 0)

    @property
    def is_alone(self) -> bool:
        """Whether it makes one use of memory beside recomputation, and of that all."""
        return self.num_uses == 1 and self.kept in (0, 1) and self.held in (0, 1)


def candidates(
    forms: Collection[Field], given: Beside, costs: CostTable, micro_steps: int = 1
) -> Iterator[Candidate]:
    """Yield all combinations: forms, transfers in flight, weights and pieces that stay.

    Args:
        forms: of one graph.
        given: what lives on because of other graphs.
        costs: times of collectives and copies.
        micro_steps: runs of the graph per optimizer step, which a weight that stays is gathered
            once for, and its piece copied.
    """
    task = next(iter(forms)).task
    weights = {name: size for name, size in task.weights.items() if name not in given.weights}
    pieces = {name: size for name, size in task.pieces.items() if name not in given.pieces}
    reduces = any(task.traffic.reductions.values())
    # Only shares count, and those depend little on the number of ranks.
    gather_us = {
        name: costs.network.collective_us("all_gather", size, 2) for name, size in weights.items()
    }
    copy_us = {name: link_us("h2d", size, costs) for name, size in pieces.items()}
    # A small gather costs more time for its bytes than a big one: latency.
    order = sorted(weights, key=lambda name: (weights[name], name))
    for stay in _shares(order, weights):
        # Of a weight that stays the piece is copied once in a step: those come last.
        once = sorted(pieces, key=lambda name: (name in stay, pieces[name], name))
        flights = [CONFIGURED, *task.flights]
        if len(stay) == len(order):  # nothing is left to gather
            flights = [each for each in flights if each == CONFIGURED or (each.is_lean and reduces)]
        for on_device in _shares(once, pieces):
            saved = [
                us / micro_steps if n in stay else us for n, us in copy_us.items() if n in on_device
            ]
            for form, flight in itertools.product(forms, flights):
                yield Candidate(
                    form=form,
                    beside=given.joined(Beside(stay, on_device)),
                    flight=flight,
                    kept=_part((gather_us[name] for name in stay), gather_us.values()),
                    held=_part(saved, copy_us.values()),
                )


@dataclass
class Estimates:
    """What is expected of candidates, by the trials of others.

    Args:
        costs: times of copies.
    """

    costs: CostTable
    _start: Candidate | None = None
    """The first that was tried: others are estimated by how they differ from it."""
    _overhead_us: dict[tuple[object, ...], float] = field(default_factory=dict)
    _off_us: dict[tuple[object, ...], float] = field(default_factory=dict)
    """How far estimates were off, by what was decided about gathers."""
    _behind: dict[tuple[object, ...], int] = field(default_factory=dict)
    """What passes behind the split last added to a peak, by the form and its gathers."""

    def learn(self, candidate: Candidate, point: Point, outcome: Outcome) -> None:
        """Remember a trial; the first is that of a graph with nothing beside it."""
        if self._start is None:
            self._start = candidate
        elif candidate.num_uses > 1:
            off_us = outcome.overhead_us - self._sum(self._start, candidate)
            self._off_us[candidate.kept, candidate.flight] = off_us
        self._overhead_us[candidate.key] = outcome.overhead_us
        self._behind[candidate.gathers] = outcome.peak_bytes - point.peak_bytes

    @property
    def saved_bytes(self) -> int:
        """The most that passes behind the split took away from a peak."""
        return max(0, -min(self._behind.values(), default=0))

    def behind_bytes(self, candidate: Candidate) -> int | None:
        """Return what passes behind the split are expected to add to peaks; None: no idea.

        Copies start and end where passes put them: what frees memory in one form does so there, but
        what is in flight is much the same in all.
        """
        known = self._behind.get(candidate.gathers)
        alone = self._behind.get((id(candidate.form), CONFIGURED, 0.0))
        if known is not None or alone is None or self._start is None:
            return known
        form, flight = id(self._start.form), candidate.flight
        start = self._behind[form, CONFIGURED, 0.0]
        ahead = self._behind.get((form, flight, 0.0), start)
        return alone + self._behind.get((form, flight, candidate.kept), ahead) - start

    def overhead_us(self, candidate: Candidate) -> float:
        """Return what is expected, or what is known."""
        known = self._overhead_us.get(candidate.key)
        if known is not None or self._start is None:
            return known or 0.0
        off = self._off_us.get((candidate.kept, candidate.flight), 0.0)
        return max(0.0, self._sum(self._start, candidate) + off)

    def _sum(self, start: Candidate, other: Candidate) -> float:
        """Return what its uses are worth alone, added up."""
        form, kept, held = id(start.form), other.kept, other.held
        moved = self._effect(start, (id(other.form), CONFIGURED, 0.0, 0.0))
        if moved is None:
            moved = copied_us(other.form, self.costs)
        ahead = self._effect(start, (form, other.flight, 0.0, 0.0)) or 0.0
        gathered = self._effect(start, (form, CONFIGURED, 1.0, 0.0)) or 0.0
        copied = self._effect(start, (form, CONFIGURED, 0.0, 1.0)) or 0.0
        worth = moved + (1 - kept) * ahead + kept * gathered + held * copied
        return self._overhead_us[start.key] + worth

    def _effect(self, start: Candidate, key: tuple[object, ...]) -> float | None:
        known = self._overhead_us.get(key)
        return None if known is None else known - self._overhead_us[start.key]


def copied_us(form: Field, costs: CostTable) -> float:
    """Return what copies of activations take from compute at least."""
    moved = sum(each.num_bytes for each in form.move.swapped)
    return costs.device.link_load * costs.device.round_trip_us() * moved


def _shares(order: Sequence[str], sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Return the first names of an order, with their bytes, up to several shares of all bytes."""
    ends = list(itertools.accumulate(sizes[name] for name in order))
    counts = {
        sum(end <= share * ends[-1] * (1 + 1e-9) for end in ends) if ends else 0
        for share in _SHARES
    }
    return [{name: sizes[name] for name in order[:count]} for count in sorted(counts)]


def _part(some: Iterable[float], whole: Iterable[float]) -> float:
    """Return a share that is 1 for all, in whatever order they come."""
    total = math.fsum(whole)
    return math.fsum(some) / total if total else 0.0
