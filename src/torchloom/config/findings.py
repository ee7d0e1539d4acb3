"""What checking a configuration finds: errors, notes and hints. All are collected, then raised at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from torchloom.config.kinds import RefusedError, number_in, show

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An error: where it is, what is wrong, what to do."""

    path: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; {self.fix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something translated, assumed or ignored that the user may want to know."""

    level: Literal["info", "warning"]
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hint:
    """A key treated as a hint: what was asked, what is used (None: nothing), and why."""

    path: str
    asked: object
    used: object
    why: str

    def __str__(self) -> str:
        used = "nothing" if self.used is None else show(self.used)
        return f"{self.path}: asked {show(self.asked)}, used {used} ({self.why})"


@dataclass(slots=True)
class Findings:
    """Collects what one check finds, so that all errors can be reported at once."""

    errors: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    """Paths that are "auto" and need a value from the caller."""

    def error(self, path: str, what: str, fix: str) -> None:
        """Add an error.

        Args:
            path: the key, as the user wrote it.
            what: what is wrong.
            fix: what to do.
        """
        self.errors.append(Problem(path=path, what=what, fix=fix))

    def leave_open(self, path: str) -> None:
        """Note an "auto" that has no value and no default: the caller has to give one."""
        if path not in self.open:
            self.open.append(path)

    def warn(self, path: str, message: str) -> None:
        """Add a warning."""
        self.notes.append(Note(level="warning", path=path, message=message))

    def info(self, path: str, message: str) -> None:
        """Add a note that asks for nothing."""
        self.notes.append(Note(level="info", path=path, message=message))

    def hint(self, path: str, *, asked: object, used: object, why: str) -> None:
        """Add a key that is treated as a hint.

        Args:
            path: the key.
            asked: the value that the user gave.
            used: the value that torchloom uses; None: none.
            why: the reason.
        """
        self.hints.append(Hint(path=path, asked=asked, used=used, why=why))

    def take(self, kind: Callable[[object], T], value: object, path: str) -> T | None:
        """Return what `kind` reads; a refused value is an error and None.

        Text that is a number is read as one with a warning, as DeepSpeed does, where the kind takes numbers.

        Args:
            kind: reads the value.
            value: as the user wrote it.
            path: the key.
        """
        try:
            return kind(value)
        except RefusedError as refusal:
            if (number := number_in(value)) is None:
                self.error(path, refusal.what, refusal.fix)
                return None
        if (taken := self.take(kind, number, path)) is not None:
            told = f"{show(value)} is text, read as {show(number)}: write it without quotes"
            self.warn(path, told)
        return taken

    def has_error_at(self, *paths: str) -> bool:
        """Return whether one of these paths, or a part of it, has an error or is left open."""
        wrong = [*(error.path for error in self.errors), *self.open]
        return any(
            each == path or each.startswith((f"{path}.", f"{path}["))
            for each in wrong
            for path in paths
        )


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word closest to `word`, or None when nothing is close.

    Example:
        >>> nearest("stagee", ["stage", "overlap_comm"])
        'stage'
    """
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None
