"""What bodies of operators do on the host, for work that is recorded once and replayed: a replay runs no Python.

again    host work that each replay repeats, such as naming and counting a collective
never    host work that no replay can repeat, such as a choice that depends on what is on the device now
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class HostWork:
    """What was done on the host in a block."""

    acts: list[Callable[[], object]] = field(default_factory=list)
    """What each replay repeats, in order."""
    refusals: list[str] = field(default_factory=list)
    """Why the block cannot be replayed."""


class _Watched(threading.local):
    """Of one thread: autograd runs backward of a GPU on threads of its own."""

    work: HostWork | None = None


_WATCHED = _Watched()


@contextmanager
def watched() -> Iterator[HostWork]:
    """Collect the host work of this thread in a `with` block."""
    before, _WATCHED.work = _WATCHED.work, HostWork()
    try:
        yield _WATCHED.work
    finally:
        _WATCHED.work = before


def again(act: Callable[..., object], *args: object) -> None:
    """Let each replay of what is recorded now do this as well; the caller does it for this time."""
    if _WATCHED.work is not None:
        _WATCHED.work.acts.append(functools.partial(act, *args))


def never(why: str) -> None:
    """Say that what runs now cannot be replayed.

    Args:
        why: in words that continue "it is not recorded: ".
    """
    if _WATCHED.work is not None:
        _WATCHED.work.refusals.append(why)
