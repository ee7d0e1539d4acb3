"""What a failed guard comes down to: which value, what the entry expected, what came, what to do."""

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
    """The value that was looked at, in words; empty where it is none in particular."""
    expected: str
    """What the entry demands of it."""
    actual: str
    """What came, where torch says it."""
    fix: str


Rule = tuple[re.Pattern[str], Callable[..., Reason]]
"""A sentence of torch, and what makes the reason of its groups."""


def rules(*sentences: tuple[str, Callable[..., Reason]]) -> list[Rule]:
    """Return rules whose patterns are for whole sentences, which may go over several lines."""
    return [(re.compile(pattern, re.S), build) for pattern, build in sentences]


def in_words(source: str) -> str:
    """Return the source of a value in words, nothing where a sentence names none."""
    return source_in_words(source.strip()) if source.strip() else ""
