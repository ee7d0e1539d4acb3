"""Where this process is in its run: its optimizer step, what it is busy with, what it waits for.

Everything that communicates writes here, and whoever has to say why a run stands still reads it.
One process has one position; all writes are assignments, so that a thread may read at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class SyncPoint(Protocol):
    """Something that other ranks have to come to as well."""

    @property
    def key(self) -> int:
        """A number that is equal on ranks that have come to the same."""
        ...

    @property
    def channel(self) -> str:
        """The group of ranks, by name."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that have to come."""
        ...

    def text(self) -> str:
        """Say in words what it is."""
        ...


class Wait(NamedTuple):
    """What a rank waits for, and since when."""

    event: SyncPoint
    since_s: float


class Verdict(NamedTuple):
    """Why a run cannot go on: one sentence, the same on every rank."""

    kind: str
    """"differ": ranks run different programs; "lost": a rank has ended or cannot be reached;
    "late": a rank did not come within its limit."""
    text: str


class Rates(NamedTuple):
    """What the optimizer steps with."""

    key: int = 0
    """A checksum of all its numbers."""
    text: Callable[[], str] = str
    """Says them in words."""


@dataclass
class Position:
    """What is known of this process."""

    step: int = 0
    """Optimizer steps that have been taken: part of what ranks compare."""
    updates: int = 0
    """Steps of all torch optimizers over torchloom's parameters: part of what ranks compare."""
    backwards: int = 0
    """Backward passes of all engines: part of what ranks compare."""
    loads: int = 0
    """Modules of sharded models that took weights from a state dict: part of what ranks compare."""
    actor: int = 0
    """The engine that acts, where a process has several: part of what ranks compare."""
    rates: Rates = field(default_factory=Rates)
    """What the optimizer steps with: part of what ranks compare."""
    phase: str = ""
    """What takes long just now, e.g. "compiling graph0"; empty in the course of a step."""
    phase_since_s: float = 0.0
    waiting: Wait | None = None
    last: SyncPoint | None = None
    """What has been begun last."""
    verdict: Verdict | None = None
    """Once there is one, nothing may communicate any more."""
    notes: dict[str, str] = field(default_factory=dict)
    """Facts that explain why ranks may differ, e.g. a graph that runs eagerly."""
    on_verdict: list[Callable[[], None]] = field(default_factory=list)
    """What ends a wait that does not look at the verdict by itself."""

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Say what takes long for the length of a `with` block; blocks may nest."""
        before = self.phase, self.phase_since_s
        self.phase, self.phase_since_s = phase, time.monotonic()
        try:
            yield
        finally:
            self.phase, self.phase_since_s = before


POSITION = Position()
"""This process's."""
