"""A model with transfers of every kind, and a second opinion on races: schedules are played with adverse timing, and broken on purpose.

The player knows nothing of the checker's rules. It runs a schedule with every transfer at once and
then again with transfers as late as their engine and their waits allow: all, all of one engine, or
a single one. Memory holds tokens; freed memory holds poison. A schedule is *bad* if under any
timing a use reads other tokens than the unbroken schedule's use read, or a transfer or a use writes
memory that was freed. What is not bad is *equivalent*: no timing that the player knows shows a
difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from torchloom.races import Free, Start, TransferSchedule, WaitFor

OFFLOADING = {"offload_activation": {"min_bytes": 1}}
JOINT = ["dedupe_gathers", "elide_copies", "zero3", "offload_activation"]
LOWERED = ["place", "bucket", "prefetch", "overlap_copies"]


class Mixed(nn.Module):
    """A norm, a residual and two activations: copies, gathers and reductions side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 9)
        self.gate = nn.Linear(7, 9)
        self.down = nn.Linear(9, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return (x + self.down(F.silu(self.gate(h)) * self.up(h))).tanh().square().mean()


POISON = "poison"


class Played(NamedTuple):
    reads: tuple[tuple[str, tuple[str, ...]], ...]
    """(use, tokens that it read), in order."""
    clobbered: bool
    """Whether freed memory was written."""


def play(schedule: TransferSchedule, late: frozenset[str]) -> Played:
    """Run a schedule; transfers named in `late` run as late as possible, others at once."""
    at = schedule.memory_of
    memory = {at(name): f"given {name}" for name in schedule.given}
    freed: set[str] = set()
    queues: dict[str, list[Start]] = {}
    reads: list[tuple[str, tuple[str, ...]]] = []
    clobbered = False

    def run(job: Start) -> None:
        nonlocal clobbered
        token = f"{job.job}({', '.join(memory.get(at(v), POISON) for v in sorted(job.reads))})"
        for target in job.writes:
            clobbered |= at(target) in freed
            memory[at(target)] = f"{token} {target}"

    def catch_up(engine: str, until: str | None) -> None:
        queue = queues.get(engine, [])
        while queue and (until is None or any(job.job == until for job in queue)):
            run(queue.pop(0))

    for event in schedule.events:
        if isinstance(event, Start):
            # Messages on the network overtake each other: each has a queue of its own.
            key = event.job if event.engine == "network" else event.engine
            queues.setdefault(key, []).append(event)
            if not any(job.job in late for job in queues[key]):
                catch_up(key, event.job)
        elif isinstance(event, WaitFor):
            for key in queues:
                catch_up(key, event.job)
        elif isinstance(event, Free):
            freed.add(at(event.value))
            memory[at(event.value)] = POISON
        else:
            seen = tuple(memory.get(at(v), POISON) for v in sorted(event.reads))
            reads.append((event.name, seen))
            for target in event.writes:
                clobbered |= at(target) in freed
                memory[at(target)] = f"{event.name}({', '.join(seen)}) {target}"
    return Played(tuple(reads), clobbered)


def timings(schedule: TransferSchedule) -> Iterator[frozenset[str]]:
    """Yield which transfers are late: none, all, all of one engine, each alone."""
    starts = [event for event in schedule.events if isinstance(event, Start)]
    yield frozenset()
    yield frozenset(job.job for job in starts)
    for engine in sorted({job.engine for job in starts}):
        yield frozenset(job.job for job in starts if job.engine == engine)
    for job in starts:
        yield frozenset({job.job})


def is_bad(mutant: TransferSchedule, original: TransferSchedule) -> bool:
    """Say whether some timing shows that a mutant is not the schedule that it was made from."""
    expected = play(original, frozenset()).reads
    return any(
        played.clobbered or played.reads != expected
        for played in (play(mutant, late) for late in timings(mutant))
    )


def mutants(schedule: TransferSchedule) -> Iterator[tuple[str, TransferSchedule]]:
    """Yield (what was broken, schedule): one mistake each, at every place where it can be made."""
    events = schedule.events
    for index, event in enumerate(events):
        if isinstance(event, WaitFor):
            yield "dropped wait", _with(schedule, events[:index] + events[index + 1 :])
            for later in _places(index + 1, len(events)):
                yield "late wait", _with(schedule, _moved(events, index, later))
        elif isinstance(event, Free):
            for earlier in _places(0, index):
                yield "early free", _with(schedule, _moved(events, index, earlier))
        elif isinstance(event, Start):
            for place in (*_places(0, index), *_places(index + 1, len(events))):
                yield "moved start", _with(schedule, _moved(events, index, place))
            yield from _shared_slots(schedule, event)


def _places(first: int, end: int) -> list[int]:
    """Near and far places of a range: its ends and its middle."""
    return sorted({first, (first + end) // 2, end - 1}) if first < end else []


def _shared_slots(schedule: TransferSchedule, job: Start) -> Iterator[tuple[str, TransferSchedule]]:
    """Let a transfer write where another one of its direction writes: a slot used twice."""
    for other in schedule.events:
        if not isinstance(other, Start) or other is job or other.engine != job.engine:
            continue
        mine, theirs = sorted(job.writes)[0], sorted(other.writes)[0]
        places = {**schedule.places, mine: schedule.memory_of(theirs)}
        # The slot dies with its last user.
        deaths = [i for i, e in enumerate(schedule.events) if e in (Free(mine), Free(theirs))]
        kept = [event for i, event in enumerate(schedule.events) if i not in deaths[:-1]]
        yield "slot reuse", dataclasses.replace(schedule, events=tuple(kept), places=places)


def _moved(events: tuple, index: int, place: int) -> tuple:
    rest = [*events[:index], *events[index + 1 :]]
    rest.insert(place, events[index])
    return tuple(rest)


def _with(schedule: TransferSchedule, events: tuple) -> TransferSchedule:
    return dataclasses.replace(schedule, events=tuple(events))
