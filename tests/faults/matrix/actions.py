"""What the runner does to a running case from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faults.matrix.ranks import Run


@dataclass(frozen=True)
class Action:
    """Something to do, and when."""

    is_ready: Callable[[Run], bool]
    do: Callable[[Run], None]


def _is_marked(run: Run) -> bool:
    return run.marked("ready") is not None


def _cut(side: int) -> Callable[[Run], None]:
    return lambda run: run.hosts[side].set_link("down")


def _lose(run: Run) -> None:
    one, other = run.hosts
    one.lose_packets(other)
    other.lose_packets(one)


ACTIONS = {
    "cut at rank 0": Action(_is_marked, _cut(0)),
    "cut at rank 1": Action(_is_marked, _cut(1)),
    "lose": Action(_is_marked, _lose),
}
