"""The kinds of rows in the table of private torch. Data alone: nothing here imports torch."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class _Ranged:
    """A row with the versions of torch that it holds for: from the first to the last, "" for no bound."""

    since: str = ""
    until: str = ""

    def holds_on(self, version: str) -> bool:
        """Return whether the row is about a version of torch, such as "2.13.0+cpu".

        Example:
            >>> _Ranged(since="2.12", until="2.13").holds_on("2.13.1+cpu")
            True
        """
        number = _number(version)
        is_late = not self.since or number >= _number(self.since)
        return is_late and (not self.until or number <= _number(self.until))

    @property
    def versions(self) -> str:
        """The range in words."""
        if not self.since:
            return f"up to {self.until}" if self.until else "all"
        return f"{self.since} to {self.until}" if self.until else f"since {self.since}"


def _number(version: str) -> tuple[int, ...]:
    """Return the first two parts of a version: nightly builds count as the release that they lead to."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


@dataclass(frozen=True, kw_only=True)
class PrivateName(_Ranged):
    """A private name of torch that torchloom uses.

    Args:
        name: the path to it. After a colon stands a word of a module's source; "|" stands before another name
            that serves in its place.
        without: what happens where it is missing.
        is_needed: whether what needs it fails without it.
    """

    name: str
    without: str
    is_needed: bool = True


@dataclass(frozen=True, kw_only=True)
class Patch(_Ranged):
    """A place where torchloom replaces or wraps something of torch's, or works around what torch does.

    Args:
        name: what of torch's is changed or worked around.
        where: the function of torchloom that does it.
        because: what torch does by itself.
        issue: the issue or change upstream; "" where none is known.
        reproduction: one line that shows what torch does, where there is no issue.
        without: what happens without it.
    """

    name: str
    where: str
    because: str
    without: str
    issue: str = ""
    reproduction: str = ""


@dataclass(frozen=True, kw_only=True)
class Fact(_Ranged):
    """Something that differs between versions of torch though no name does.

    Args:
        name: the function of torchloom that tells; it returns True for the versions of the row.
        differs: what is so in these versions, and what in others.
    """

    name: str
    differs: str
