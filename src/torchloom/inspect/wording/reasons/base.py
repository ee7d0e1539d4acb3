"""The reason why a guard failed: which value, what the entry expected, what it got, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from torchloom.inspect.wording.english import source_in_words

ANOTHER = "another value"
ANOTHER_LENGTH = "another length"


class Reason(NamedTuple):
    """Why an entry was rejected."""

    source: str
    """The value that was checked, in words; empty if the check is about no particular value."""
    expected: str
    """What the entry requires."""
    actual: str
    """What the call had, where torch says so."""
    fix: str
    """What the user can do about it; empty if nothing is known."""


Rule = tuple[re.Pattern[str], Callable[..., Reason]]
"""A sentence of torch, and what makes the reason of its groups."""


def rules(*sentences: tuple[str, Callable[..., Reason]]) -> list[Rule]:
    """Return rules whose patterns are for whole sentences, which may go over several lines."""
    return [(re.compile(pattern, re.S), build) for pattern, build in sentences]


def in_words(source: str) -> str:
    """Return the source of a value in words, nothing where a sentence names none."""
    return source_in_words(source.strip()) if source.strip() else ""
