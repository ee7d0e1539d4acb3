"""The view of a function: its entries, its graph breaks, and its text with marks at both."""

from __future__ import annotations

import re

from torchloom.records.summary import count
from torchloom.report.page.advice import LIMIT_FIX, limit_text, why_made
from torchloom.report.page.elements import (
    Node,
    el,
    empty,
    pairs,
    prose,
    seconds,
    section,
    table,
    told,
)  # fmt: skip
from torchloom.report.page.index import BreakItem, FunctionItem, Index


def function_view(index: Index, item: FunctionItem) -> Node:
    """Return all of a function: its place, its entries, its breaks, its text."""
    fn, limit = item.fn, limit_text(item.fn)
    facts: list[tuple[Node, Node]] = [
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
    rest: list[Node] = [
        ["li", each.link(), f" line {each.fn.line}, {count(len(each.entries), 'entry', 'entries')}"]
        for each in index.functions
        if each.parent is item
    ]
    entries: list[list[Node]] = [
        [each.link(), str(len(each.entry.guards)),
         str(len(each.entry.kernels)), each.calls, seconds(each.compile_s), each.entry.status,
         why_made(each)]
        for each in item.entries
    ]  # fmt: skip
    columns = ["entry", "#guards", "#kernels", "#calls", "#compile time", "status"]
    uncompiled = "no call of it was compiled while watching"
    return el(
        "",
        ["div.loud", ["strong", f"{item.name}: {limit}."], ["p", prose(LIMIT_FIX)]]
        if limit
        else None,
        pairs(facts),
        section(
            "Entries",
            table([*columns, "why it was made"], entries),
            none=f"None: {'Dynamo runs this function eagerly' if fn.skipped else uncompiled}.",
        ),
        section(
            "Graph breaks",
            *(_break(index, each) for each in index.breaks if each.owner is item),
            none="None: every graph of it reaches the end.",
        ),
        section("Source", _source(index, item)),
        section("Continued after a break in", ["ul", *rest] if rest else None),
    )


def _break(index: Index, item: BreakItem) -> Node:
    each, entry = item.each, item.item
    where = ["", ", first in entry ", entry.link()] if entry else None
    stack = [["summary", "Stack, innermost last"], ["pre.text", "\n".join(each.user_stack)]]
    return el(
        "article.break",
        ["h3", each.reason, " ", ["span.faint", each.gb_type]],
        el(
            "p",
            "At ",
            ["code", index.short(each.place)],
            f", met {item.count} times" if item.count > 1 else "",
            where or ", and no entry was made",
        ),
        ["p", prose(each.explanation)] if each.explanation else None,
        ["ul", *(["li", prose(hint)] for hint in each.hints)] if each.hints else None,
        ["details", *stack] if each.user_stack else None,
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
    places = [(each.each.place, each.each.reason) for each in index.breaks]
    born = [(g.user_line, g.english) for each in item.entries for g in each.entry.guards]

    def by_line(
        found: list[tuple[str, str]] | list[tuple[str | None, str]],
    ) -> dict[int, list[str]]:
        marks: dict[int, dict[str, None]] = {}
        for place, text in found:
            at = re.match(r"(.*):(\d+)(?: in .*)?$", place or "", re.DOTALL)
            if at and at[1] == fn.file and int(at[2]) in lines:
                marks.setdefault(int(at[2]), {})[text] = None
        return {line: list(texts) for line, texts in marks.items()}

    breaks, guards = by_line(places), by_line(born)
    key = []
    if breaks:
        key += [["span.tag.bad", "break"], " a graph ends here. "]
    if guards:
        key += [["span.tag.info", "guards"], " conditions that began here."]
    text = {"is": "Source", "text": fn.source, "first": fn.line, "start": item.fn.line}
    return ["", told(*key), {**text, "breaks": breaks, "guards": guards}]
