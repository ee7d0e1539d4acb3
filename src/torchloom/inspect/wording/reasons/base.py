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


BRANCH = "each value makes an entry of its own: pass few different ones, or branch outside"
DYNAMIC_FIX = "pass it as a tensor, or compile with dynamic=True"
LENGTHS = (
    "each length makes an entry of its own: pass one length, or stack the values into one tensor"
)
ATTRIBUTES = "give all objects that are passed the same attributes and keys"
SIZES_FIX = "the function branches on this: keep to sizes for which it holds, or branch outside"
NAN = "nan makes an entry of its own: keep it out of numbers, or pass the number as a tensor"
ATTRIBUTE_FIX = (
    "pass it as a tensor, or as an argument of its own; dynamic=True does not help where it is an "
    "attribute of a module"
)
MODULE_FIX = "an attribute of a module is a constant of the graph: make it a buffer, or an argument"
TYPES = "pass values of one type"
APART = "sizes 0 and 1 are compiled apart, also with dynamic=True"


def constant_fix(source: str, value: str) -> str:
    """Return the advice that ends recompiles for a constant that changes.

    Args:
        source: in words. Only numbers among the arguments themselves can become dynamic.
        value: as code.
    """
    is_number = re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?|-?inf|nan", value.strip()) is not None
    if source.startswith("global "):
        return (
            "a global is a constant of the graph: pass it as an argument"
            if not is_number
            else "a global is a constant of the graph: pass it as an argument, as a tensor"
        )
    if source.startswith("self"):
        return (
            MODULE_FIX
            if is_number
            else "an attribute of a module is a constant of the graph: keep it, or pass it as an argument"
        )
    if re.fullmatch(r"-?\d+", value.strip()):
        # Of a name alone nothing tells whether it is a module whose attribute this is.
        return DYNAMIC_FIX if re.fullmatch(r"\w* ?\w+", source) else ATTRIBUTE_FIX
    if is_number:
        return "pass it as a tensor"
    return BRANCH
