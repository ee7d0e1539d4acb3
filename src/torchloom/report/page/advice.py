"""What to mend first: recompile limits, then graph breaks and recompiles, the costliest on top."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torchloom.records import Function, Recompile
from torchloom.report.page.elements import Node, count, el, empty, prose, section
from torchloom.report.page.index import BreakItem, EntryItem, Index

_SHOWN = 10
_PLACES_NAMED = 4
LIMIT_FIX = (
    "Fix: end the recompiles below, or raise `torch._dynamo.config.recompile_limit`. Calls that an "
    "entry fits stay compiled; all others run eagerly, without a word from torch."
)


@dataclass(kw_only=True)
class Cause:
    """Recompiles that one fix ends: of one function about one value, or by one call to mark a size."""

    item: EntryItem
    each: Recompile
    value: str
    entries: list[EntryItem] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    followers: list[str] = field(default_factory=list)
    """Other values that came with it."""


def fix_first(index: Index) -> Node:
    """Return what to fix, the most important first."""
    title = "What to fix first"
    causes, breaks = recompile_causes(index), _break_causes(index)
    items = [*_limits(index), *(_break(index, each) for each in breaks[:_SHOWN])]
    items += [_recompile(each) for each in causes[:_SHOWN]]
    if not items:
        seen = "Nothing: no graph break and no recompile was seen."
        none = "Nothing was compiled while watching, so there is nothing to fix."
        return section(title, empty(seen if index.entries else none))
    rest = max(0, len(breaks) - _SHOWN) + max(0, len(causes) - _SHOWN)
    more = ["p.told", f"and {rest} more, at their functions"] if rest else None
    return section(title, el("ol.fixes", *items), more)


def has_fixes(index: Index) -> bool:
    """Return whether there is anything to fix."""
    return bool(index.breaks or recompile_causes(index) or _limits(index))


def limit_text(function: Function) -> str:
    """Return what a function that is not compiled any more says of itself."""
    calls = function.num_eager_calls
    told = f"; {count(calls, 'call')} ran eagerly" if calls else ""
    if function.recompile_limit is not None:
        return f"reached the recompile limit of {function.recompile_limit}{told}"
    return f"is not compiled any more{told}" if calls else ""


def actual_value(each: Recompile, item: EntryItem) -> str:
    """Return what came. The check may not say it; what the new entry was made for does."""
    if each.actual and each.actual != "another value":
        return each.actual
    pinned = item.entry.trigger.get(each.source.removeprefix("argument "), "")
    return pinned.removeprefix("== ") or each.actual


def why_made(item: EntryItem) -> str:
    """Return in one line why an entry was made.

    The newest of the older entries speaks for all that were rejected alike.
    """
    rejected = item.entry.recompiles
    if not rejected:
        return "first entry" if item.owner.entries[0] is item else "not recorded"
    first, num = rejected[0], len(rejected)
    actual = actual_value(first, item)
    source = f"{first.source}: " if first.source else ""
    alike = [r for r in rejected[1:] if r.source == first.source and r.expected != first.expected]
    if actual and alike and len(alike) == num - 1:
        return f"{source}got {actual}, which none of {num} older entries expects"
    more = f" (and {num - 1} more)" if num > 1 else ""
    if not first.expected:
        return first.text + more
    return f"{source}expected {first.expected}, got {actual or 'another value'}{more}"


def recompile_causes(index: Index) -> list[Cause]:
    """Return the causes of recompiles, the most frequent first."""
    found: dict[tuple[str, ...], Cause] = {}
    for item in index.entries:
        for each in item.entry.recompiles:
            # Without a source, the check itself names the value: `n == 'a'`.
            named = re.split(r" (?:==|!=|<=|>=|<|>|is|in) ", each.expected)[0]
            value = each.source or named or each.text
            fix = re.sub(r"^now dynamic: entry [^;]*; ", "", each.fix)
            is_shared = re.search(r" (?:call of|compile|compiling) ", f" {fix}")
            key = (fix,) if is_shared else (item.owner.id, value, each.fix)
            cause = found.setdefault(key, Cause(item=item, each=each, value=value))
            _note(cause.entries, item)
            if item.owner is not cause.item.owner or value != cause.value:
                _note(cause.followers, f"{value} of {item.owner.name}")
                continue
            _note(cause.checks, each.expected.strip())
            _note(cause.values, actual_value(each, item))
    return sorted(found.values(), key=lambda cause: -len(cause.entries))


def _note(known: list[Any], value: Any) -> None:
    if value and value not in known:
        known.append(value)


def _few(texts: list[str]) -> str:
    return ", ".join([*texts[:4], *(["..."] if len(texts) > 4 else [])])


def _tag(kind: str, text: str) -> Node:
    return [f"span.tag.{kind}", text]


def _limits(index: Index) -> list[Node]:
    items: list[Node] = [
        ["li", _tag("bad", "recompile limit"), " ", each.link(),
         ["strong", f" {limit_text(each.fn)}"], ["p.fix", prose(LIMIT_FIX)]]
        for each in index.functions
        if limit_text(each.fn)
    ]  # fmt: skip
    unknown = index.session.num_unknown_eager_calls
    if unknown:
        told = (
            f" {count(unknown, 'call')} of functions that could not be told apart ran eagerly: no "
            "entry fitted, and nothing is compiled any more."
        )
        items.append(["li", _tag("bad", "eager calls"), told])
    return items


def _break_causes(index: Index) -> list[list[BreakItem]]:
    """Return the breaks of each kind that one change of habit ends, with all their places."""
    found: dict[tuple[str, str], list[BreakItem]] = {}
    for item in index.breaks:
        hint = item.each.hints[0] if item.each.hints else ""
        found.setdefault((item.each.gb_type or item.each.reason, hint), []).append(item)
    return list(found.values())


def _break(index: Index, places: list[BreakItem]) -> Node:
    num, met = len(places), sum(each.count for each in places)
    first = places[0]
    named: list[Node] = []
    for each in places[:_PLACES_NAMED]:
        named += [", " if named else "", ["code", index.short(each.each.place)]]
    more = num - _PLACES_NAMED
    return el(
        "li",
        _tag("bad", f"{num} graph breaks" if num > 1 else "graph break"),
        " ",
        ["strong", prose(first.each.reason)],
        " at ",
        *named,
        f" and {more} more places" if more > 0 else "",
        f", met {met} times" if met > num else "",
        " in ",
        first.owner.link(),
        ["p.fix", "Fix: ", prose(first.each.hints[0])] if first.each.hints else None,
    )


def _recompile(cause: Cause) -> Node:
    num, each = len(cause.entries), cause.each
    expected = ["was expected as ", ["code", _few(cause.checks)]]
    if cause.values:
        expected += [", came as ", ["code", _few(cause.values)]]
    return el(
        "li",
        _tag("warn", "recompile" if num == 1 else f"{num} recompiles"),
        " of ",
        cause.item.owner.link(),
        ": ",
        ["", ["strong", each.source], " "] if each.source else None,
        *(expected if each.expected else [each.text]),
        f"; so did, with it, {_few(cause.followers)}" if cause.followers else "",
        ["p.fix", "Fix: ", prose(each.fix)] if each.fix else None,
    )
