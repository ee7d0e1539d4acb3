"""What a schedule does, and the rules that it must keep for every timing of its transfers.

Events of one issuing thread, over values in memory, named by strings:

    Use     compute reads and writes values; uses happen in order
    Start   a transfer is handed to its engine; it may run at any time from here on
    WaitFor what comes after happens after the transfer, and after all that its engine got before
    Free    memory is given back; whoever gets it next may write it at once

Transfers of one engine run in order (a copy thread, a CUDA stream), except on the network, where
messages overtake each other. Every transfer runs after all that compute did before its start: a
stream waits for the compute stream, and a thread gets its work when it is issued.

A value has memory of its own unless the schedule places it elsewhere: values that take turns in a
slot are placed in one memory.

With one issuing thread the happens-before relation is simple: an event happens after a transfer if
and only if a wait stands between them, for that transfer or for a later one of the same in-order
engine. So a single walk that knows which transfers may still run finds every unordered pair of
accesses, and only those:

* compute must not read what a running transfer writes, nor write what one reads or writes;
* a transfer must not start on memory that a running transfer of another engine uses, if either
  writes it;
* memory must not be freed while a running transfer uses it, nor used after it was freed;
* a value must have been written before it is read, and not been overwritten by another value that
  is placed in the same memory;
* every transfer is waited for exactly once before the schedule ends, so schedules may follow each
  other in any way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Engine = Literal["to_host", "to_device", "network"]
IN_ORDER: frozenset[Engine] = frozenset({"to_host", "to_device"})


@dataclass(frozen=True, slots=True)
class Use:
    """Compute reads and writes values."""

    name: str
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Start:
    """A transfer begins; `job` names it."""

    job: str
    engine: Engine
    reads: frozenset[str]
    writes: frozenset[str]


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Compute waits until a transfer is done."""

    job: str


@dataclass(frozen=True, slots=True)
class Free:
    """The memory of a value is given back."""

    value: str


Event: TypeAlias = Use | Start | WaitFor | Free


@dataclass(frozen=True, slots=True)
class TransferSchedule:
    """The events of a graph or a step, in the order in which they are issued."""

    events: tuple[Event, ...]
    given: frozenset[str] = frozenset()
    """Values that are there before the first event."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Memory of values that do not have their own."""

    def memory_of(self, value: str) -> str:
        """Return the name of the memory that holds a value."""
        return self.places.get(value, value)


Kind = Literal[
    "read before arrival",
    "written under way",
    "freed under way",
    "used after free",
    "read before written",
    "overwritten",
    "waited for without start",
    "never waited for",
]


@dataclass(frozen=True, slots=True)
class Race:
    """A rule that a schedule breaks."""

    kind: Kind
    at: int
    """Index of the event; the number of events for what is missing at the end."""
    subject: str
    """The memory, or the transfer."""
    other: str = ""
    """The transfer that may still be running."""


def find_races(schedule: TransferSchedule) -> list[Race]:
    """Return every broken rule, in the order of events; an empty list is the proof.

    Example:
        >>> read = Use("read", reads=frozenset({"y"}))
        >>> reload = Start("r", "to_device", frozenset({"x"}), frozenset({"y"}))
        >>> given = frozenset({"x"})
        >>> find_races(TransferSchedule((reload, WaitFor("r"), read), given))
        []
        >>> [race.kind for race in find_races(TransferSchedule((reload, read, WaitFor("r")), given))]
        ['read before arrival']
    """
    walk = _ScheduleWalk(schedule, {schedule.memory_of(value): value for value in schedule.given})
    for index, event in enumerate(schedule.events):
        walk.step(index, event)
    end = len(schedule.events)
    walk.races += [Race("never waited for", end, job.job) for job in walk.running]
    # Sets have an order of their own in each process.
    return sorted(walk.races, key=lambda race: (race.at, race.subject, race.other, race.kind))


@dataclass
class _ScheduleWalk:
    """What is known after a prefix of the events."""

    schedule: TransferSchedule
    holds: dict[str, str]
    """The value that each memory was given last."""
    freed: set[str] = field(default_factory=set)
    running: list[Start] = field(default_factory=list)
    busy: dict[str, list[tuple[Start, bool]]] = field(default_factory=dict)
    """Memories that running transfers use, and whether they write them."""
    started: dict[str, Start] = field(default_factory=dict)
    """Transfers that nothing has waited for."""
    races: list[Race] = field(default_factory=list)

    def step(self, at: int, event: Event) -> None:
        if isinstance(event, Use):
            self._access(at, event)
        elif isinstance(event, Start):
            self._access(at, event, event.engine if event.engine in IN_ORDER else None)
            self.running.append(event)
            self.started[event.job] = event
            for values, is_write in ((event.reads, False), (event.writes, True)):
                for value in values:
                    memory = self.schedule.memory_of(value)
                    self.busy.setdefault(memory, []).append((event, is_write))
        elif isinstance(event, WaitFor):
            self._wait(at, event.job)
        else:
            self._free(at, self.schedule.memory_of(event.value))

    def _access(self, at: int, event: Use | Start, engine: Engine | None = None) -> None:
        """Check what an event reads and writes; `engine` is one whose transfers are done before it begins."""
        memory_of = self.schedule.memory_of
        for value in event.reads:
            memory = memory_of(value)
            held = self.holds.get(memory)
            if memory in self.freed:
                self.races.append(Race("used after free", at, value))
            if held != value:
                kind: Kind = "read before written" if held is None else "overwritten"
                self.races.append(Race(kind, at, value))
            for job, is_write in self.busy.get(memory, ()):
                if is_write and job.engine != engine:
                    self.races.append(Race("read before arrival", at, memory, job.job))
        for value in event.writes:
            memory = memory_of(value)
            if memory in self.freed and value not in event.reads:
                self.races.append(Race("used after free", at, value))
            others = {job.job for job, _ in self.busy.get(memory, ()) if job.engine != engine}
            self.races += [Race("written under way", at, memory, job) for job in others]
        self.holds.update((memory_of(value), value) for value in event.writes)

    def _wait(self, at: int, name: str) -> None:
        found = self.started.pop(name, None)
        if found is None:
            self.races.append(Race("waited for without start", at, name))
        elif found in self.running:
            index = self.running.index(found)
            for job in self.running[: index + 1]:
                if job is found or (job.engine == found.engine and job.engine in IN_ORDER):
                    self._finish(job)

    def _finish(self, job: Start) -> None:
        self.running.remove(job)
        for memory in map(self.schedule.memory_of, job.reads | job.writes):
            self.busy[memory] = [each for each in self.busy[memory] if each[0] is not job]

    def _free(self, at: int, memory: str) -> None:
        if memory in self.freed:
            self.races.append(Race("used after free", at, memory))
        jobs = {job.job for job, _ in self.busy.get(memory, ())}
        self.races += [Race("freed under way", at, memory, job) for job in jobs]
        self.freed.add(memory)
