"""The position of this process in its run: its optimizer step, what it does, what it waits for.

Code that communicates writes it; code that explains why a run stands still reads it.
One process has one position; all writes are assignments, so that a thread may read at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torchloom.errors import AgreementError, PeerLostError, TorchloomError


class SyncPoint(Protocol):
    """A point that other ranks have to reach as well, such as a collective."""

    @property
    def key(self) -> int:
        """A number that is equal on all ranks at the same point."""
        ...

    @property
    def channel(self) -> str:
        """The group of ranks, by name."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that have to reach it."""
        ...

    def text(self) -> str:
        """Return a description of it."""
        ...


class Wait(NamedTuple):
    """What a rank waits for, and since when."""

    event: SyncPoint
    since_s: float


class Verdict(NamedTuple):
    """Why a run cannot go on: one sentence, the same on every rank."""

    kind: str
    """"differ": ranks run different programs; "lost": a rank has ended or cannot be reached;
    "late": a rank did not reach the point within its time limit."""
    text: str

    def error(self) -> TorchloomError:
        """Return the error to raise."""
        return (AgreementError if self.kind == "differ" else PeerLostError)(self.text)


class Rates(NamedTuple):
    """The rates that the optimizer uses, such as learning rates."""

    key: int = 0
    """A checksum of all its numbers."""
    text: Callable[[], str] = str
    """Returns them as text."""


@dataclass
class Position:
    """The position of one process."""

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
    purpose: str = ""
    """What gathers outside of training are for, in words: part of what ranks compare. Empty in training."""
    rates: Rates = field(default_factory=Rates)
    """The rates of the optimizer: part of what ranks compare."""
    phase: str = ""
    """The long operation in progress, e.g. "compiling graph0"; empty during a step."""
    waiting: Wait | None = None
    last: SyncPoint | None = None
    """The last sync point that was begun."""
    verdict: Verdict | None = None
    """Once it is set, nothing may communicate any more."""
    notes: dict[str, str] = field(default_factory=dict)
    """Facts that explain why ranks may differ, e.g. a graph that runs eagerly."""
    on_verdict: list[Callable[[], None]] = field(default_factory=list)
    """Called to end waits that do not check the verdict themselves."""

    @contextmanager
    def gathering(self, purpose: str) -> Iterator[None]:
        """Set what gathers are for in a `with` block, so that other ranks take none of them for one of training.

        Args:
            purpose: for example "for whole weights".
        """
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Set the long operation in progress for a `with` block; blocks may nest.

        Args:
            phase: for example "compiling graph0".
        """
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


POSITION = Position()
"""The position of this process."""
