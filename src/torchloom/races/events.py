"""What a schedule does: events of one issuing thread, over values in memory, named by strings.

    Use     compute reads and writes values; uses happen in order
    Start   a transfer is handed to its engine; it may run at any time from here on
    Wait    what comes after happens after the transfer, and after all that its engine got before
    Free    memory is given back; whoever gets it next may write it at once

Transfers of one engine run in order (a copy thread, a CUDA stream), except on the network, where
messages overtake each other. Every transfer runs after all that compute did before its start: a
stream waits for the compute stream, and a thread gets its work when it is issued.

A value has memory of its own unless the schedule places it elsewhere: values that take turns in a
slot are placed in one memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Engine = Literal["to_host", "to_device", "network"]
ENGINES: tuple[Engine, ...] = ("to_host", "to_device", "network")
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
class Wait:
    """Compute goes on when a transfer is done."""

    job: str


@dataclass(frozen=True, slots=True)
class Free:
    """The memory of a value is given back."""

    value: str


Event: TypeAlias = Use | Start | Wait | Free


@dataclass(frozen=True, slots=True)
class Schedule:
    """Events in the order in which they are issued."""

    events: tuple[Event, ...]
    given: frozenset[str] = frozenset()
    """Values that are there before the first event."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Memory of values that do not have their own."""

    def memory_of(self, value: str) -> str:
        """Return the name of the memory that holds a value."""
        return self.places.get(value, value)
