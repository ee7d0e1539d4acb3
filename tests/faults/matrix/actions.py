"""What the runner does to a running case from outside."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from os import kill
from typing import TYPE_CHECKING

from faults.matrix import traces

if TYPE_CHECKING:
    from faults.matrix.ranks import Run


@dataclass(frozen=True)
class Action:
    """Something to do, and when."""

    is_ready: Callable[[Run], bool]
    do: Callable[[Run], None]


def _is_marked(run: Run) -> bool:
    return run.marked("ready") is not None


def _trains(run: Run) -> bool:
    """Whether `torchloom train` has printed some steps."""
    return run.processes[0].text().count("ms/step") >= 3


def _cut(side: int) -> Callable[[Run], None]:
    return lambda run: run.hosts[side].set_link("down")


def _lose(run: Run) -> None:
    one, other = run.hosts
    one.lose_packets(other)
    other.lose_packets(one)


def _signal_launcher(number: int) -> Callable[[Run], None]:
    return lambda run: run.processes[0].popen.send_signal(number)


def _kill_worker(run: Run) -> None:
    for pid in run.living():
        if traces.rank_of(pid) == 1:
            kill(pid, signal.SIGKILL)


ACTIONS = {
    "cut at rank 0": Action(_is_marked, _cut(0)),
    "cut at rank 1": Action(_is_marked, _cut(1)),
    "lose": Action(_is_marked, _lose),
    "kill worker": Action(_trains, _kill_worker),
    "kill launcher": Action(_trains, _signal_launcher(signal.SIGKILL)),
    "terminate": Action(_trains, _signal_launcher(signal.SIGTERM)),
    "interrupt": Action(_trains, _signal_launcher(signal.SIGINT)),
}
