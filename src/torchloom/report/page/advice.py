"""What to mend first: recompile limits, then graph breaks and recompiles, the costliest on top."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torchloom.records import Function, Recompile
from torchloom.records.summary import count
from torchloom.report.page.elements import Node, el, few, prose
from torchloom.report.page.index import BreakItem, EntryItem, Index

_SHOWN = 10
_PLACES_NAMED = 4
LIMIT_FIX = (
    "Fix: end the recompiles below, or raise `torch._dynamo.config.recompile_limit`. Calls that an "
    "entry fits stay compiled; all others run eagerly, without a word from torch."
)
Rejection = tuple[str, Recompile, EntryItem]
"""The value that did not fit, in words, why, and the entry that was made for it."""


def fix_first(index: Index) -> Node:
    """Return what to fix, the most important first; None if there is nothing."""
    causes, breaks = _causes(index), _break_causes(index)
    items = [*_limits(index), *(_break(index, each) for each in breaks[:_SHOWN])]
    items += [_recompile(each) for each in causes[:_SHOWN]]
    rest = max(0, len(breaks) - _SHOWN) + max(0, len(causes) - _SHOWN)
    more: Node = ["p.told", f"and {rest} more, at their functions"] if rest else None
    return el("", ["ol.fixes", *items], more) if items else None


def limit_text(function: Function) -> str:
    """Return what a function that is not compiled any more says of itself."""
    return (function.skipped or "") if function.num_eager_calls else ""


def why_made(item: EntryItem) -> str:
    """Return in one line why an entry was made: the newest of the older entries speaks for all."""
    rejected = item.entry.recompiles
    if not rejected:
        return "first entry" if item.owner.entries[0] is item else "not recorded"
    first, num = rejected[0], len(rejected)
    alike = [r for r in rejected[1:] if r.source == first.source and r.expected != first.expected]
    if first.actual and alike and len(alike) == num - 1:
        return f"{first.source or 'the call'}: got {first.actual}, which none of {num} older entries expects"
    more = f" (and {num - 1} more)" if num > 1 else ""
    return (first.sentence if first.expected else first.text) + more


def _causes(index: Index) -> list[list[Rejection]]:
    """Return the recompiles that one fix ends, of one value or by one call to mark a size, the most frequent first."""
    found: dict[tuple[str, ...], list[Rejection]] = {}
    for item in index.entries:
        for each in item.entry.recompiles:
            # Without a source, the check itself names the value: `n == 'a'`.
            named = re.split(r" (?:==|!=|<=|>=|<|>|is|in) ", each.expected)[0]
            value = each.source or named or each.text
            fix = re.sub(r"^now dynamic: entry [^;]*; ", "", each.fix)
            is_shared = re.search(r" (?:call of|compile|compiling) ", f" {fix}")
            key = (fix,) if is_shared else (item.owner.id, value, each.fix)
            found.setdefault(key, []).append((value, each, item))
    return sorted(found.values(), key=lambda rows: -len({id(item) for _, _, item in rows}))


def _recompile(rows: list[Rejection]) -> Node:
    value, each, item = rows[0]
    own = [r for v, r, i in rows if i.owner is item.owner and v == value]
    others = [(v, i) for v, _, i in rows if i.owner is not item.owner or v != value]
    num = len({id(i) for _, _, i in rows})
    values = _once(r.actual for r in own)
    followers = _once(f"{v} of {i.owner.name}" for v, i in others)
    expected = ["was expected as ", ["code", few(_once(r.expected.strip() for r in own))]]
    if values:
        expected += [", came as ", ["code", few(values)]]
    return el(
        "li",
        ["span.tag.warn", "recompile" if num == 1 else f"{num} recompiles"],
        " of ",
        item.owner.link(),
        ": ",
        ["", ["strong", each.source], " "] if each.source else None,
        *(expected if each.expected else [each.text]),
        f"; so did, with it, {few(followers)}" if followers else "",
        _fix(each.fix),
    )


def _once(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


def _fix(text: str) -> Node:
    return ["p.fix", "Fix: ", prose(text)] if text else None


def _limits(index: Index) -> list[Node]:
    items: list[Node] = [
        ["li", ["span.tag.bad", "recompile limit"], " ", each.link(),
         ["strong", f": {limit_text(each.fn)}"], ["p.fix", prose(LIMIT_FIX)]]
        for each in index.functions
        if limit_text(each.fn)
    ]  # fmt: skip
    if unknown := index.session.num_unknown_eager_calls:
        told = (
            f" {count(unknown, 'call')} of functions that could not be told apart ran eagerly: no "
            "entry fitted, and nothing is compiled any more."
        )
        items.append(["li", ["span.tag.bad", "eager calls"], told])
    return items


def _break_causes(index: Index) -> list[list[BreakItem]]:
    """Return the breaks of each kind that one change of habit ends, with all their places."""
    found: dict[tuple[str, str], list[BreakItem]] = {}
    for item in index.breaks:
        hint = "".join(item.each.hints[:1])
        found.setdefault((item.each.gb_type or item.each.reason, hint), []).append(item)
    return list(found.values())


def _break(index: Index, places: list[BreakItem]) -> Node:
    num, met, first = len(places), sum(each.count for each in places), places[0]
    named = [["code", index.short(each.each.place)] for each in places[:_PLACES_NAMED]]
    more = num - _PLACES_NAMED
    return el(
        "li",
        ["span.tag.bad", f"{num} graph breaks" if num > 1 else "graph break"],
        " ",
        ["strong", prose(first.each.reason)],
        " at ",
        named[0],
        *(part for each in named[1:] for part in (", ", each)),
        f" and {more} more places" if more > 0 else "",
        f", met {met} times" if met > num else "",
        " in ",
        first.owner.link(),
        _fix("".join(first.each.hints[:1])),
    )
