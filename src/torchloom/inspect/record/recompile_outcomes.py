"""Completes the reasons of a recompile from the guards of the entry that it made."""

from __future__ import annotations

import re

from torchloom.inspect.record.module_members import is_in_module
from torchloom.inspect.wording.english import source_in_words
from torchloom.inspect.wording.reasons.base import ANOTHER, ANOTHER_LENGTH
from torchloom.inspect.wording.reasons.fixes import (
    APART,
    ATTRIBUTE_FIX,
    DYNAMIC_FIX,
    MODULE_FIX,
    NAN,
    TYPES,
)
from torchloom.records import Entry, Guard, Recompile

_SIZE = re.compile(r"size\((\d+)\) == ")
_CLASS = re.compile(r"<class '([^']+)'>")
_SIZES = re.compile(r"size=\[([^\]]*)\]")


def explain_recompiles(entry: Entry) -> None:
    """Add to each reason the value of the call, and whether the new entry fits other values as well."""
    if not entry.guards:
        return
    for each in entry.recompiles:
        found = _SIZE.match(each.expected)
        if found:
            _explain_size(entry, each, int(found.group(1)))
        elif each.actual in (ANOTHER, ANOTHER_LENGTH):
            _explain_value(entry, each)


def _explain_size(entry: Entry, reason: Recompile, index: int) -> None:
    lowest = _lowest(entry, reason.source, index)
    if lowest is None:
        return
    old = int(reason.expected.rpartition(" ")[2])
    if old < lowest:
        more = APART
    else:
        more = (
            f"torch._dynamo.mark_dynamic(tensor, {index}) before the first call saves this compile"
        )
    reason.fix = f"now dynamic: entry {entry.compile_id} serves sizes >= {lowest}; {more}"


def _explain_value(entry: Entry, reason: Recompile) -> None:
    """Add the value of the call if the new entry requires it; otherwise the entry fits other values too."""
    about = [g for g in entry.guards if source_in_words(g.source) == reason.source]
    if reason.actual == ANOTHER_LENGTH:
        lengths = (re.fullmatch(r"len\(.*\) == (.+)", guard.text) for guard in about)
        reason.actual = next((f"len {found.group(1)}" for found in lengths if found), reason.actual)
        return
    for guard in about:
        if guard.text.startswith(f"{guard.source} == "):
            reason.actual = guard.text.removeprefix(f"{guard.source} == ")
            _explain_constant(entry, reason, guard.source)
        elif guard.english.endswith(" is nan"):
            reason.actual, reason.fix = "nan", NAN
        elif guard.kind == "TYPE_MATCH" and reason.expected.startswith("== "):
            _explain_type(entry, reason, guard)


def _explain_constant(entry: Entry, reason: Recompile, source: str) -> None:
    """Choose the advice for an integer that the new entry requires as well."""
    if not re.fullmatch(r"== -?\d+", reason.expected):
        return
    in_module = is_in_module(source, entry.guards)
    if in_module:
        reason.fix = MODULE_FIX
    elif in_module is False and reason.fix == ATTRIBUTE_FIX:
        reason.fix = DYNAMIC_FIX


def _explain_type(entry: Entry, reason: Recompile, guard: Guard) -> None:
    """Add the type of the value in the call, or say that the new entry fits other values of that type."""
    named = _CLASS.search(guard.text)
    if named is None:
        return
    for name, words, number in (
        ("int", "integers", r"== -?\d+"),
        ("float", "floats", r"== (?:-?[\d.]+(?:e[+-]?\d+)?|-?inf|nan)"),
    ):
        if named.group(1) == name and re.fullmatch(number, reason.expected):
            reason.fix = f"now dynamic: entry {entry.compile_id} serves other {words} as well"
            return
    reason.actual, reason.fix = f"a `{named.group(1)}`", TYPES


def _lowest(entry: Entry, source: str, index: int) -> int | None:
    """Return the smallest size that an entry accepts for a dim; None if it accepts one size only."""
    for guard in entry.guards:
        if guard.kind != "TENSOR_MATCH" or source_in_words(guard.source) != source:
            continue
        sizes = _SIZES.search(guard.text)
        parts = [part.strip() for part in sizes.group(1).split(",")] if sizes else []
        if index >= len(parts) or parts[index] != "None":
            return None
        return _bound(entry, guard.source, index)
    return None


def _bound(entry: Entry, source: str, index: int) -> int:
    size = re.escape(f"{source}.size()[{index}]")
    lowest = 0
    for guard in entry.guards:
        for pattern in (rf"(\d+) <= {size}", rf"{size} >= (\d+)"):
            found = re.search(pattern, guard.text)
            if found:
                lowest = max(lowest, int(found.group(1)))
    return lowest
