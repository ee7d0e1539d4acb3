"""Why Dynamo recompiled: the older entry, what it expected, what it got, and what the new entry makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from torch import nn

from torchloom.inspect.wording.english import source_in_words
from torchloom.inspect.wording.fixes import (
    APART,
    ATTRIBUTE_FIX,
    DYNAMIC_FIX,
    MODULE_FIX,
    NAN,
    TYPES,
)
from torchloom.inspect.wording.hider import Hider
from torchloom.inspect.wording.reasons import ANOTHER, ANOTHER_LENGTH, reason_of
from torchloom.inspect.wording.scrub import without_addresses, without_values
from torchloom.records import Entry, Guard, Recompile

_CLASS = re.compile(r"<class '([^']+)'>")
_TABLE = re.compile(r"\._(?:modules|parameters|buffers)\b")


def is_in_module(source: str, guards: Sequence[Guard]) -> bool | None:
    """Return whether the source of a value leads through a module; None where that is not known.

    Args:
        source: as Dynamo writes it.
        guards: of the entry; those on types tell what the source leads through.
    """
    if _TABLE.search(source):
        return True
    types = {g.source: found.group(1) for g in guards if (found := _CLASS.search(g.text))}
    owners = [types.get(owner) for owner in _owners(source)]
    modules = _names_of_modules(nn.Module)
    if any(name in modules for name in owners):
        return True
    return None if None in owners else False


def _owners(source: str) -> Iterator[str]:
    """Yield the sources of what holds a value: of `L['a'].b[0]` those of a and b."""
    for match in re.finditer(r"\.\w+|\[[^\[\]]+\]", source):
        owner = source[: match.start()]
        if owner not in ("L", "G") and not owner.endswith(".__dict__"):
            yield owner


def _names_of_modules(base: type) -> set[str]:
    """Return the classes of modules as Python prints them, local ones as well."""
    found, waiting = set(), [base]
    while waiting:
        each = waiting.pop()
        name = f"{each.__module__}.{each.__qualname__}"
        if name not in found:
            found.add(name)
            waiting += type.__subclasses__(each)
    return found


def parse_reasons(payload: str, hider: Hider | None = None) -> list[Recompile]:
    """Read one `recompile_reasons`: a text, or a JSON list of texts, one per older entry.

    Args:
        payload: as Dynamo logs it.
        hider: notes the keys that the texts name.
    """
    try:
        data = json.loads(payload)
    except ValueError:
        data = payload
    texts = data if isinstance(data, list) else [data]
    return [parse_reason(str(text), hider) for text in texts]


def parse_reason(text: str, hider: Hider | None = None) -> Recompile:
    """Read one reason, such as `0/0: tensor 'x' size mismatch at index 0. expected 10, actual 8`.

    Example:
        >>> r = parse_reason("0/0: tensor 'x' size mismatch at index 0. expected 10, actual 8")
        >>> r.entry, r.expected, r.actual
        ('0/0', 'size(0) == 10', '8')
    """
    entry, _, rest = text.partition(": ")
    if not re.fullmatch(r"[\d/]+", entry.strip()):
        entry, rest = "", text
    body = rest.partition("\nUser stack trace")[0].partition("  # ")[0].strip()
    if hider is not None:
        hider.note(body)
    body = without_values(body, keys_too=hider is None)
    reason = reason_of(body)
    return Recompile(
        entry=entry.strip(),
        source=reason.source,
        expected=reason.expected,
        actual=reason.actual,
        text=without_addresses(body),
        fix=reason.fix,
    )


_SIZE = re.compile(r"size\((\d+)\) == ")
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
