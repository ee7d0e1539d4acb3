"""Tandem repeats in a sequence of labels: where a stretch follows upon itself several times.

    a b c x y x y x y x y d        ->   begin 3, period 2, length 8

Source of the idea: a sequence has period p on [b, e) exactly if each label there equals the one p further
on; see Main and Lorentz, "An O(n log n) algorithm for finding all repetitions in a string", J. Algorithms 5
(1984). Captured graphs are short and their periods few, so periods are guessed from distances between equal
labels and then checked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_MOST_KINDS = 8
"""Layers of a period at most: models alternate between a few kinds (Gemma 3: five and one)."""
_MOST_PERIODS = 32
"""Periods that are checked; each check is a walk over the sequence."""


class Stretch(NamedTuple):
    """A part of the sequence on which each label equals the one a period further on."""

    begin: int
    end: int
    period: int

    @property
    def num_repeats(self) -> int:
        """How many whole periods it holds."""
        return (self.end - self.begin) // self.period


def longest_stretch(
    labels: Sequence[int], begin: int, end: int, min_repeats: int, min_period: int
) -> Stretch | None:
    """Return the stretch of a part of a sequence whose repeats cover most, None if nothing repeats.

    Args:
        labels: the sequence.
        begin: where the part begins.
        end: where it ends.
        min_repeats: how often a period has to follow upon itself.
        min_period: shorter periods do not count.
    """
    if end - begin < min_repeats * min_period:
        return None
    return max(
        _candidates(labels, begin, end, min_repeats, min_period),
        key=lambda each: (each.num_repeats * each.period, -each.period, -each.begin),
        default=None,
    )


def _candidates(
    labels: Sequence[int], begin: int, end: int, min_repeats: int, min_period: int
) -> Iterator[Stretch]:
    for period in _periods(labels, begin, end, min_period):
        start = None
        for index in range(begin, end - period + 1):
            equal = index < end - period and labels[index] == labels[index + period]
            if equal and start is None:
                start = index
            elif not equal and start is not None:
                stretch = Stretch(start, index + period, period)
                if stretch.num_repeats >= min_repeats:
                    yield stretch
                start = None


def _periods(labels: Sequence[int], begin: int, end: int, min_period: int) -> list[int]:
    """Return distances at which equal labels stand, those first that are frequent among rare labels.

    A layer holds some operators many times, at all distances, and others once, at the distance of layers.
    """
    places: defaultdict[int, list[int]] = defaultdict(list)
    for index in range(begin, end):
        places[labels[index]].append(index)
    votes: Counter[int] = Counter()
    for at in places.values():
        for apart in range(1, _MOST_KINDS + 1):
            for first, second in zip(at, at[apart:], strict=False):
                votes[second - first] += _VOTES // (len(at) * len(at))
    counted = [(period, count) for period, count in votes.items() if period >= min_period]
    counted.sort(key=lambda each: (-each[1], each[0]))
    return [period for period, _ in counted[:_MOST_PERIODS]]


_VOTES = 1 << 40
