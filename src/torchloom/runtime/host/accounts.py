"""Whose copies and host memory these are: one arena and one mover serve all engines of a device.

Host memory belongs to the account that was charged when it was taken, and what is copied into or out
of it is counted there, whoever does it: the loss of one engine may reload what another one has offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["to_host", "to_device"]


@dataclass(eq=False)
class Account:
    """What one engine, or a device altogether, has moved and holds on the host; all in bytes."""

    used: int = 0
    """In use on the host now, dead tensors included until the arena has buried them."""
    peak: int = 0
    """Most that was in use on the host at a time."""
    moved: dict[Direction, int] = field(default_factory=lambda: {"to_host": 0, "to_device": 0})
    in_flight: int = 0
    in_flight_peak: int = 0

    def take(self, num_bytes: int) -> None:
        """Note host memory that is taken, or, if negative, given back."""
        self.used += num_bytes
        self.peak = max(self.peak, self.used)

    def fly(self, num_bytes: int) -> None:
        """Note a copy that begins or, if negative, was waited for."""
        self.in_flight += num_bytes
        self.in_flight_peak = max(self.in_flight_peak, self.in_flight)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Let host memory that is taken inside a `with` block be this account's."""
        # Of the process, not of a thread: autograd runs backward of a GPU on threads of its own.
        _CHARGED.append(self)
        try:
            yield
        finally:
            _CHARGED.pop()


_CHARGED: list[Account] = []


def charged_account() -> Account | None:
    """Return the account that host memory is taken for now."""
    return _CHARGED[-1] if _CHARGED else None
