"""The exchange of a process that is alone."""

from __future__ import annotations

from typing import final


@final
class Alone:
    """One rank, which tells itself what it says; see `Exchange`."""

    rank = 0
    world_size = 1

    def texts(self, what: str, text: str) -> list[str]:
        """Return this rank's text."""
        del what
        return [text]

    def tell(self, what: str, text: str) -> None:
        """Tell nobody."""

    def hear(self, what: str, rank: int) -> str:
        """Refuse: there is no other rank."""
        raise AssertionError(f"one rank alone was asked what rank {rank} says of {what!r}")
