"""What ranks run: one function each, by name."""

from __future__ import annotations

from collections.abc import Callable

from faults.matrix.programs import (
    compilers,
    differing,
    failing,
    files,
    meeting,
    numbers,
    right,
    serving,
)
from faults.matrix.programs.rank import Rank

_ROOMS = (compilers, differing, failing, files, meeting, numbers, right, serving)

PROGRAMS: dict[str, Callable[[Rank], None]] = {
    name: value
    for room in _ROOMS
    for name, value in vars(room).items()
    if callable(value) and getattr(value, "__module__", "") == room.__name__ and name[0] != "_"
}

__all__ = ["PROGRAMS", "Rank"]
