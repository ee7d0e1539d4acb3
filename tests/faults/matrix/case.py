"""A case: what the ranks run, what goes wrong, and how each of them must end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SMALL = 16
"""Columns of the model's layers where the size does not matter."""
TAKEN = "taken"
"""In the place of a port: one that another process of this host listens at."""
LIMIT_S = 10.0
"""From the fault to the end of the last rank, where a case names no limit of its own."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """How a process must end."""

    codes: tuple[int, ...] = (1,)
    words: tuple[str, ...] = ()
    """All of them stand in its sentence."""
    speaks: bool = True
    """Whether it has to say a sentence."""
    stays: bool = False
    """Stopped, not ended: killed by the runner when the others have ended."""
    shows_traceback: bool = False
    """The fault is in the user's own code, whose lines are shown."""


def told(*words: str, **rest: Any) -> Ends:
    """Return the end of a rank that says a sentence with these words and exits with 1."""
    return Ends(words=words, **rest)


def raised(*words: str) -> Ends:
    """Return the end of a rank whose own code raised."""
    return Ends(words=words, shows_traceback=True)


def killed(number: int) -> Ends:
    """Return the end of a rank that a signal ends."""
    return Ends(codes=(-number,), speaks=False)


def exits(code: int) -> Ends:
    """Return the end of a rank that exits by itself and need not say anything."""
    return Ends(codes=(code,), speaks=False)


FINE = exits(0)
STOPPED = Ends(codes=(-9,), speaks=False, stays=True)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the ranks train."""

    stage: int = 3
    backend: str = ""
    """Of torch.compile; empty for eager."""
    shared: bool = False
    """Through shared memory instead of gloo."""
    width: int = SMALL
    accumulation: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    config_of_rank_1: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Name it, for the names of cases."""
        transport = "shm" if self.shared else "gloo"
        large = "" if self.width == SMALL else f" width{self.width}"
        return f"{transport} {self.backend or 'eager'} stage{self.stage}{large}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the matrix."""

    name: str
    program: str
    ends: tuple[Ends, ...]
    """By rank; of a launcher: its own."""
    setup: Setup = Setup()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the program."""
    limit_s: float = LIMIT_S
    first: str = ""
    """A program that the same ranks run before, in the same folder; it may end as it likes."""
    launcher: str = ""
    """"torchrun"; empty: each rank is started by itself."""
    action: str = ""
    """What the runner does to the running ranks once they have said that they are ready."""
    environment: Mapping[int, Mapping[str, str | None]] = field(default_factory=dict)
    """Variables of single ranks; None takes one away."""
    absent: tuple[int, ...] = ()
    """Ranks that are never started."""
    needs_network: bool = False
    """Each rank in a network namespace of its own."""
    trains_like: str = ""
    """The case whose weights these ranks must have in the end."""
    may_end: bool = False
    """All ranks end with a sentence or all train to the same weights; both are right."""

    @property
    def num_ranks(self) -> int:
        """How many ranks the case has, whoever starts them."""
        return 2 if self.launcher else len(self.ends)

    @property
    def goes_on(self) -> bool:
        """Whether nothing is wrong with this program."""
        return all(end == FINE for end in self.ends)
