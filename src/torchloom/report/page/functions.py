"""The view of a function: its entries, its graph breaks, and its text with marks at both."""

from __future__ import annotations

import re

from torchloom.report.page.advice import LIMIT_FIX, limit_text, why_made
from torchloom.report.page.elements import (
    Node,
    count,
    el,
    empty,
    link,
    pairs,
    prose,
    seconds,
    section,
    table,
)  # fmt: skip
from torchloom.report.page.index import BreakItem, FunctionItem, Index


def function_view(index: Index, item: FunctionItem) -> Node:
    """Return all of a function: its place, its entries, its breaks, its text."""
    fn, limit = item.fn, limit_text(item.fn)
    banner: Node = ["div.loud", ["strong", f"{item.name} {limit}."], ["p", prose(LIMIT_FIX)]]
    facts = pairs(
        [
            ("place", ["code", f"{fn.file}:{fn.line}"] if fn.file else None),
            ("qualified name", ["code", fn.qualname] if fn.qualname not in ("", fn.name) else None),
            ("name of its code", ["code", fn.name] if item.name != fn.name else None),
            ("continues", item.parent.link() if item.parent else None),
            ("calls served by entries", str(fn.num_hits)),
            ("calls that fitted no entry at first", str(fn.num_misses)),
            ("calls that ran eagerly", str(fn.num_eager_calls or "")),
            ("runs eagerly", "" if limit else fn.skipped),
            ("reset", f"after {count(fn.epoch, 'reset')}" if fn.epoch else ""),
        ]
    )
    own = [each for each in index.breaks if each.owner is item]
    whole = empty("None: every graph of it reaches the end.")
    rest: list[Node] = [
        ["li", each.link(), f" line {each.fn.line}, {count(len(each.entries), 'entry', 'entries')}"]
        for each in index.functions
        if each.parent is item
    ]
    return [
        "",
        banner if limit else None,
        facts,
        section("Entries", _entries(item)),
        section("Graph breaks", *([_break(index, each) for each in own] or [whole])),
        section("Source", _source(index, item)),
        section("Continued after a break in", ["ul", *rest]) if rest else None,
    ]


def _entries(item: FunctionItem) -> Node:
    if not item.entries:
        eager = "None: Dynamo runs this function eagerly."
        none = "None: no call of it was compiled while watching."
        return empty(eager if item.fn.skipped else none)
    rows: list[list[Node]] = [
        [
            link(each.address(), each.name),
            str(len(each.entry.guards)),
            str(len(each.entry.kernels)),
            each.calls,
            seconds(each.compile_s),
            each.entry.status,
            why_made(each),
        ]
        for each in item.entries
    ]
    columns = ["entry", "#guards", "#kernels", "#calls", "#compile time", "status"]
    return table([*columns, "why it was made"], rows)


def _break(index: Index, item: BreakItem) -> Node:
    each = item.each
    where: Node = ", and no entry was made"
    if item.item:
        where = ["", ", first in entry ", link(item.item.address(), item.item.name)]
    stack: Node = [
        "details",
        ["summary", "Stack, innermost last"],
        ["pre.text", "\n".join(each.user_stack)],
    ]
    return el(
        "article.break",
        ["h3", each.reason, " ", ["span.faint", each.gb_type]],
        el(
            "p",
            "At ",
            ["code", index.short(each.place)],
            f", met {item.count} times" if item.count > 1 else "",
            where,
        ),
        ["p", prose(each.explanation)] if each.explanation else None,
        ["ul", *(["li", prose(hint)] for hint in each.hints)] if each.hints else None,
        stack if each.user_stack else None,
        ["p", "More: ", {"is": "Web", "address": each.doc_url}] if each.doc_url else None,
    )


def _source(index: Index, item: FunctionItem) -> Node:
    """Return the text of a function, with marks where graphs end and guards are born."""
    owner: FunctionItem | None = item
    # The rest of a function has no text of its own: it lies in that of the function it continues.
    while owner and not (owner.fn.source and owner.fn.file == item.fn.file):
        owner = owner.parent
    if owner is None:
        unread = f"The text of the function was not recorded: {item.fn.file} could not be read."
        return empty(
            unread if item.fn.file else "It has no text: the graph was captured to be served."
        )
    fn = owner.fn
    lines = range(fn.line, fn.line + len(fn.source.rstrip().split("\n")))

    def line_of(place: str | None) -> int | None:
        at = re.match(r"(.*):(\d+)(?: in .*)?$", place or "", re.DOTALL)
        return int(at[2]) if at and at[1] == fn.file and int(at[2]) in lines else None

    breaks: dict[int, list[str]] = {}
    guards: dict[int, dict[str, None]] = {}
    for each in index.breaks:
        if (at := line_of(each.each.place)) is not None:
            breaks.setdefault(at, []).append(each.each.reason)
    for guard in (guard for each in item.entries for guard in each.entry.guards):
        if (at := line_of(guard.user_line)) is not None:
            guards.setdefault(at, {})[guard.english] = None
    key = []
    if breaks:
        key += [["span.tag.bad", "break"], " a graph ends here. "]
    if guards:
        key += [["span.tag.info", "guards"], " conditions that began here."]
    told = {at: list(born) for at, born in guards.items()}
    return [
        "",
        ["p.told", *key],
        {"is": "Source", "text": fn.source, "first": fn.line, "start": item.fn.line,
         "breaks": breaks, "guards": told},
    ]  # fmt: skip
