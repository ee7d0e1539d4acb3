"""What a compiled step asks of whoever drives it: the other ranks, and what lives in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch.optim import Optimizer

STATES, SHARDS = "offload_opt_states", "offload_parameters"
"""Passes after which optimizer states, or shards of parameters, live in host memory."""


class Ranks(Protocol):
    """Compares and exchanges plain facts between all ranks, which call in the same order."""

    rank: int

    def check_facts(self, what: str, facts: Mapping[str, object]) -> None:
        """Raise on every rank unless all ranks hold the same facts."""
        ...

    def least(self, what: str, value: int) -> int:
        """Return the smallest value that any rank holds."""
        ...

    def most(self, what: str, value: int) -> int:
        """Return the largest value that any rank holds."""
        ...

    def texts(self, what: str, text: str) -> list[str]:
        """Return the text of every rank, by rank."""
        ...


class HostMemory(Protocol):
    """Moves optimizer states and shards of one model between device and host memory."""

    @property
    def names(self) -> frozenset[str]:
        """What lives on the host now: `STATES`, `SHARDS`."""
        ...

    def follow(self, names: Collection[str]) -> None:
        """Move to the host what the passes of these names ask for, and the rest back."""
        ...

    def make_room(self) -> None:
        """Let nothing stay on the device that may wait, until the next `fit` and `keep_shards`."""
        ...

    def keep_shards(self, names: Collection[str]) -> None:
        """Let the shards of these parameters, and no others, stay on the device."""
        ...

    def fit(self, free_bytes: int, step_bytes: int) -> None:
        """Let as many optimizer states stay on the device as there is room for."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """Who drives a compiled step: an engine, or a loop of one's own."""

    ranks: Ranks
    host: HostMemory
    optimizer: Optimizer | None = None
    """Over this rank's shards; None where nothing is trained, or nothing is planned for it."""
    step: int = 0
    """The optimizer step that comes next."""
    as_shards: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """Within it parameters hold what the optimizer steps."""
    name: str = "engine.compile()"
    """What the user called, for messages."""
