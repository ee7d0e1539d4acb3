"""Does what a trace relied on hold for every size of a contract?

Every guard that a trace recorded is evaluated for every size (for every combination, where several
sizes vary and there are not too many). One that fails somewhere is no reason to compile again later, but
to say so now: with the line that asked, the sizes that fail, and where the range would have to be cut.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchloom._torch.symbols import SizeGuard
from torchloom.serve.specs import Dim

_MOST_POINTS = 200_000
"""Combinations that are all tried; of more, the corners and random ones."""
_NUM_RANDOM = 20_000

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Verdict:
    """What became of one guard."""

    guard: str
    where: str
    """File and line of the user's code, where known."""
    failing: tuple[Sizes, ...]
    """Sizes for which it does not hold; all of them, or those found."""
    is_exhaustive: bool
    """Whether every combination of sizes was tried."""

    @property
    def holds(self) -> bool:
        """Whether no size was found that breaks it."""
        return not self.failing

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        if self.holds:
            how = "for every size" if self.is_exhaustive else "wherever it was tried"
            return f"holds {how}: {self.guard}{at}"
        return f"fails for {show_sizes(self.failing)}: {self.guard}{at}"


def prove(
    guards: Iterable[SizeGuard], dims: Sequence[Dim], traced: Sizes, seed: int = 0
) -> list[Verdict]:
    """Evaluate guards for all sizes.

    Args:
        guards: what a trace relied on.
        dims: the sizes that vary.
        traced: what they were during the trace: different numbers for different ones.
        seed: of random combinations, where there are too many to try all.
    """
    # Sizes that do not vary are numbers in a trace, even where one is equal to a varying one.
    name_of = {traced[dim.name]: dim.name for dim in dims if dim.min < dim.max}
    return [_judge(guard, dims, name_of, traced, seed) for guard in guards]


def cuts(verdicts: Iterable[Verdict], dim: Dim) -> list[int]:
    """Return sizes at which a range would have to begin anew so that each part is of one kind.

    Example:
        >>> failing = tuple({"batch": n} for n in (1, 2, 3))
        >>> cuts([Verdict("n >= 4", "", failing, True)], Dim("batch", 1, 64))
        [4]
    """
    found: set[int] = set()
    for verdict in verdicts:
        bad = {sizes[dim.name] for sizes in verdict.failing if dim.name in sizes}
        found |= {
            size for size in range(dim.min + 1, dim.max + 1) if (size in bad) != (size - 1 in bad)
        }
    return sorted(found)


def show_sizes(failing: Sequence[Sizes]) -> str:
    """Return sizes as ranges, for people.

    Example:
        >>> show_sizes([{"batch": n} for n in (1, 2, 3, 7)])
        'batch 1 to 3, 7'
    """
    names = list(failing[0]) if failing else []
    if len(names) == 1:
        numbers = sorted({sizes[names[0]] for sizes in failing})
        runs = [
            list(run) for _, run in itertools.groupby(enumerate(numbers), lambda p: p[1] - p[0])
        ]
        shown = [
            str(run[0][1]) if len(run) == 1 else f"{run[0][1]} to {run[-1][1]}" for run in runs
        ]
        more = f" and {len(shown) - 8} more ranges" if len(shown) > 8 else ""
        return f"{names[0]} {', '.join(shown[:8])}{more}"
    shown = [", ".join(f"{name} {size}" for name, size in sizes.items()) for sizes in failing[:4]]
    more = f" and {len(failing) - 4} more" if len(failing) > 4 else ""
    return "; ".join(shown) + more


def _judge(
    guard: SizeGuard, dims: Sequence[Dim], name_of: Mapping[int, str], traced: Sizes, seed: int
) -> Verdict:
    names = sorted(name_of[hint] for hint in guard.hints if hint in name_of)
    concerned = [dim for dim in dims if dim.name in names]
    points, is_exhaustive = _points(concerned, seed)
    fixed = {hint: hint for hint in guard.hints}
    failing = []
    for point in points:
        sizes = {**fixed, **{traced[name]: size for name, size in point.items()}}
        if not guard.holds(sizes):
            failing.append(point)
    text = guard.text
    for hint in sorted(guard.hints, reverse=True):
        if hint in name_of:
            text = text.replace(f"<size {hint}>", name_of[hint])
    return Verdict(text, guard.where, tuple(failing), is_exhaustive)


def _points(dims: Sequence[Dim], seed: int) -> tuple[Iterator[dict[str, int]], bool]:
    """Return combinations of sizes, and whether they are all there are."""
    count = 1
    for dim in dims:
        count *= dim.max - dim.min + 1
    ranges = [range(dim.min, dim.max + 1) for dim in dims]
    if count <= _MOST_POINTS:
        return (_named(dims, row) for row in itertools.product(*ranges)), True
    draw = random.Random(seed)
    corners = itertools.product(*({d.min, min(d.min + 1, d.max), d.max} for d in dims))
    others = (tuple(draw.choice(each) for each in ranges) for _ in range(_NUM_RANDOM))
    # Each size alone, with the others at an end: what depends on one size is then judged in full.
    alone = (
        (*(d.max if i != at else size for i, d in enumerate(dims)),)
        for at, each in enumerate(ranges)
        for size in each
    )
    return (_named(dims, row) for row in itertools.chain(corners, alone, others)), False


def _named(dims: Sequence[Dim], row: Sequence[int]) -> dict[str, int]:
    return {dim.name: size for dim, size in zip(dims, row, strict=True)}
