"""What a recompile has led to: the value that came, and whether the new entry serves others as well."""

from __future__ import annotations

import re

from torchloom.inspect.english import source_in_words
from torchloom.inspect.reasons import ANOTHER, ANOTHER_LENGTH
from torchloom.records import Entry, Recompile

_SIZE = re.compile(r"size\((\d+)\) == ")
_SIZES = re.compile(r"size=\[([^\]]*)\]")


def explain_recompiles(entry: Entry) -> None:
    """Complete the reasons of a recompile by what the new entry, which it made, demands."""
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
    if lowest is not None:
        reason.fix = (
            f"now dynamic: entry {entry.compile_id} serves sizes >= {lowest}; "
            f"torch._dynamo.mark_dynamic(tensor, {index}) before the first call saves this compile"
        )


def _explain_value(entry: Entry, reason: Recompile) -> None:
    """Add the value that came, if the new entry demands one; else it serves others too."""
    about = [g for g in entry.guards if source_in_words(g.source) == reason.source]
    sign = re.compile(r"len\(.*\) == (.+)" if reason.actual == ANOTHER_LENGTH else r"[^=]+ == (.+)")
    values = [match.group(1) for guard in about if (match := sign.fullmatch(guard.text))]
    if values:
        is_length = reason.actual == ANOTHER_LENGTH
        reason.actual = f"len {values[0]}" if is_length else values[0]
    elif reason.actual == ANOTHER and about and re.fullmatch(r"== -?\d+", reason.expected):
        if not any("<class 'int'>" in guard.text for guard in about):
            return  # something else than an integer came
        reason.fix = f"now dynamic: entry {entry.compile_id} serves other integers as well"


def _lowest(entry: Entry, source: str, index: int) -> int | None:
    """Return the least size that an entry takes for a dim; None if it takes one size alone."""
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
