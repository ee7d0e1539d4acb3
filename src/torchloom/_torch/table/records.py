"""The kinds of rows. Data alone: nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class _Ranged:
    """A row with the versions of torch that it holds for.

    Args:
        since: the first version, such as "2.13"; None for all before `until`.
        until: the last version; None for all after `since`.
    """

    since: str | None = None
    until: str | None = None

    def holds_on(self, version: str) -> bool:
        """Return whether the row is about a version of torch, such as "2.13.0+cpu".

        Example:
            >>> _Ranged(since="2.12", until="2.13").holds_on("2.13.1+cpu")
            True
        """
        number = _number(version)
        is_late = self.since is None or number >= _number(self.since)
        return is_late and (self.until is None or number <= _number(self.until))

    @property
    def versions(self) -> str:
        """The range in words."""
        if self.since is None:
            return "all" if self.until is None else f"up to {self.until}"
        return f"since {self.since}" if self.until is None else f"{self.since} to {self.until}"


def _number(version: str) -> tuple[int, int]:
    """Return the first two parts of a version: nightly builds count as the release that they lead to."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is no version of torch: write two numbers, such as 2.13")
    return int(found[1]), int(found[2])


@dataclass(frozen=True, kw_only=True)
class PrivateName(_Ranged):
    """A private name of torch that torchloom uses.

    Args:
        name: the path to it. After a colon stands a word of a module's source, for what is no attribute of
            anything before torch has run: marks on objects, local variables, keys.
        used_for: what for.
        without: what happens where it is missing.
        is_needed: whether what needs it fails without it; otherwise it is left out, or done in another way.
        instead: the name of the row that serves in its place.
    """

    name: str
    used_for: str
    without: str
    is_needed: bool = True
    instead: str | None = None


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
        detected: how the function tells.
    """

    name: str
    differs: str
    detected: str


def each(
    owner: str, names: str, used_for: str, without: str, **more: object
) -> Iterator[PrivateName]:
    """Yield one row for each of several names of one owner.

    Args:
        owner: their path; one that ends with a colon is a module whose source has the names.
        names: separated by blanks.
        used_for: as for a `PrivateName`.
        without: as for a `PrivateName`.
        more: further fields.
    """
    dot = "" if owner.endswith(":") else "."
    for name in names.split():
        yield PrivateName(name=f"{owner}{dot}{name}", used_for=used_for, without=without, **more)  # type: ignore[arg-type]
