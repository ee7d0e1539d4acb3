"""The views of an entry, the graphs and passes of which the page's script draws."""

from __future__ import annotations

import re
from typing import Any

from torchloom.records import Entry, Guard, Kernel
from torchloom.records.summary import count
from torchloom.report.page.elements import (
    Node,
    choice,
    el,
    empty,
    pairs,
    prose,
    seconds,
    section,
    table,
    told,
)  # fmt: skip
from torchloom.report.page.index import EntryItem, Index, rest_name
from torchloom.report.page.timeline import compile_bars

_MAX_GUARD = 500
"""Letters of a condition that are shown."""
_MAX_BACKEND = 90
_UNREAD = "The bytecode could not be read back as source."


def entry_views(index: Index, item: EntryItem) -> dict[str, Node]:
    """Return the facts of an entry, with the call that made it, and its parts by their addresses."""
    return {
        "head": _head(index, item),
        "guards": _guards(index, item.entry),
        "kernels": _kernels(item.entry.kernels),
        "code": _code(item.entry),
        "bytecode": _bytecode(index, item),
        "recompile": _recompile(item),
        "time": _times(item),
    }


def _guards(index: Index, entry: Entry) -> Node:
    rows: list[list[Node]] = [
        [
            [
                "div",
                ["div", prose(g.english or g.text)],
                ["code.sub.wrap", g.text[:_MAX_GUARD] + " ..." * (len(g.text) > _MAX_GUARD)],
            ],
            ["code", g.kind],
            ["code.wrap", index.short(g.user_line or "")],
            ["span.tag.bad", str(g.num_fails)] if g.num_fails else "0",
        ]
        for g in sorted(entry.guards, key=_guard_order)
    ]
    if not rows:
        return empty("No guard was recorded for this entry.")
    time = entry.guard_check_us
    checked = "" if time is None else f"; checking all takes {time:.1f} µs"
    columns = ["condition", "kind", "user line", "#calls rejected"]
    return ["", told(f"{count(len(rows), 'guard')}{checked}"), table(columns, rows, "guards")]


def _guard_order(guard: Guard) -> tuple[bool, bool, bool, int]:
    """Return a key: guards about arguments first, which are the ones that fail; then modules, then the rest."""
    is_value = guard.source.startswith("L[") or (
        not guard.source and not guard.text.startswith(("G[", "torch.", "___", "utils_device"))
    )
    is_module = re.search(r"^L\['self'\]|__self__|_modules", guard.source) is not None
    is_tensor = re.match(r"TENSOR_MATCH|SHAPE_ENV|EQUALS_MATCH|CONSTANT_MATCH", guard.kind)
    return not is_value, is_module, not is_tensor, -guard.num_fails


def _kernels(kernels: list[Kernel]) -> Node:
    none = "No kernel was generated: the backend generates none, or each operator calls a library."
    shown = [_kernel(each, each is kernels[0]) for each in kernels]
    return ["", *shown] if shown else empty(none)


def _kernel(kernel: Kernel, is_open: bool) -> Node:
    lines = count(len(kernel.source.rstrip().split("\n")), "line")
    computes = f"Computes: {', '.join(kernel.nodes)}"
    is_cpp = re.search(r"c\+\+|cpp", kernel.language, re.IGNORECASE)
    text = _text("Searchable", kernel.source, kernel.name, "cpp" if is_cpp else "python")
    computed = told(computes if kernel.nodes else "Which nodes it computes is not known.")
    return {
        "is": "Fold",
        "title": ["", ["code", kernel.name], ["span.faint", f" {kernel.language}, {lines}"]],
        "body": ["", computed, text],
        "isFirst": is_open,
    }


def _code(entry: Entry) -> Node:
    kinds = ("output_code", "runnable")
    found = [each for kind in kinds for each in entry.artifacts if each.kind == kind]
    if found:
        return choice(
            "Text",
            [
                (each.title or each.kind, _text("Searchable", each.text, each.title, "python"))
                for each in found
            ],
            0,
        )
    return empty(
        "No generated code was recorded: the backend wrote none, or the entry came from a cache."
    )


def _text(kind: str, text: str, label: str, language: str, missing: str = "") -> Node:
    return {"is": kind, "text": text, "label": label, "language": language, "missing": missing}


def _bytecode(index: Index, item: EntryItem) -> Node:
    """Before and after Dynamo, and what follows a graph break."""
    entry = item.entry
    if not (entry.pseudo_source or entry.bytecode):
        return empty("No bytecode was recorded for this entry.")

    def listing(title: str, text: str) -> Node:
        return section(title, _text("Code", text, title, "plain", "It was not recorded."))

    numbered = enumerate(entry.continuations, 1)
    return el(
        "",
        section("What it does", _text("Code", entry.pseudo_source, "source", "python", _UNREAD)),
        section(
            "What follows its graph break, in the order of the calls",
            *(_continuation(index, i, each) for i, each in numbered),
        ),
        [
            "div.beside",
            listing("Bytecode that Python compiled", entry.original_bytecode),
            listing("Bytecode that Dynamo wrote", entry.bytecode),
        ],
    )


def _continuation(index: Index, i: int, each: Any) -> Node:
    known = (f.link() for f in index.functions if f.parent and f.fn.name == each.function)
    taken: list[Node] = [["span.tag.warn", "not compiled: not taken, or it holds no operator"]]
    if each.num_entries:
        versions = f": {count(each.num_entries, 'compiled version')}"
        taken = [["span.tag.good", "taken"], versions]
    name = next(known, None) or rest_name(each.function, each.line)
    text = _text("Code", each.source, f"source of {each.name}", "python", _UNREAD)
    return ["article.continuation", ["h3", f"{i}. ", name, " ", *taken], text]


def _head(index: Index, item: EntryItem) -> Node:
    entry, short = item.entry, item.entry.backend.partition("(")[0]
    is_long = len(entry.backend) > _MAX_BACKEND
    whole = ["details", ["summary", short], ["code.wrap", entry.backend]]
    facts = pairs(
        [
            ("function", item.owner.link()),
            ("backend", whole if is_long else entry.backend),
            ("status", "live" if entry.status == "live" else ["span.tag.warn", entry.status]),
            ("calls served", item.calls),
            ("compile time", seconds(item.compile_s)),
            ("attempts", str(entry.attempts) if entry.attempts > 1 else None),
        ],
        ".facts",
    )
    return el("", facts, _trigger(entry), _stack(index, entry))


def _trigger(entry: Entry) -> Node:
    """The arguments of the call that made the entry: tensors and constants before mere types."""
    rows = sorted(entry.trigger.items(), key=lambda row: bool(re.match(r"an? `", row[1])))
    if not rows:
        return None
    brief = "; ".join([*(f"{name} {value}" for name, value in rows[:2]), "..."][: len(rows)])
    every = pairs((["code", name], prose(value)) for name, value in rows)
    return ["details.trigger", ["summary", "Made by a call with ", prose(brief)], every]


def _stack(index: Index, entry: Entry) -> Node:
    """The calls of the user's code that led to the compile."""
    calls = [["code", index.short(call)] for call in entry.stack]
    if not calls:
        return None
    summary = ["summary", "Compiled in the call at ", calls[-1]]
    return ["details.trigger.stack-of-calls", summary, ["ol", *(["li", call] for call in calls)]]


def _recompile(item: EntryItem) -> Node:
    rejected = item.entry.recompiles
    if not rejected:
        first = "This is the first entry of its function: nothing was recompiled for it."
        unknown = "Why older entries could not serve was not recorded."
        return empty(first if item.owner.entries[0] is item else unknown)
    epoch = item.entry.epoch
    older = {e.entry.compile_id: e for e in item.owner.entries if e.entry.epoch == epoch}
    rows: list[list[Node]] = [
        [
            older[each.entry].link() if each.entry in older else each.entry,
            each.source,
            ["code", each.expected],
            ["code", each.actual],
            ["code.sub.wrap", each.text],
        ]
        for each in rejected
    ]
    fixes = dict.fromkeys(each.fix for each in rejected if each.fix)
    return el(
        "",
        ["p", "This entry was made because no older one could serve the call."],
        table(["older entry", "rejected for", "expected", "came as", "check"], rows),
        section("Fix", ["ul", *(["li", prose(fix)] for fix in fixes)] if fixes else None),
    )


def _times(item: EntryItem) -> Node:
    entry = item.entry
    colours = {"hit": "good", "miss": "warn"}
    uses: list[list[Node]] = [
        [use.cache, [f"span.tag.{colours.get(use.outcome, 'info')}", use.outcome], use.reason]
        for use in entry.caches
    ]
    parts = {name: of for name, of in entry.metrics.items() if isinstance(of, dict)}
    single = {name: of for name, of in entry.metrics.items() if name not in parts}
    numbers = [["div", ["h3", name], _metrics(of)] for name, of in parts.items()]
    return [
        "",
        section(
            "Phases",
            {"is": "Flame", "bars": compile_bars(item)} if entry.spans else None,
            none="No compile spans were recorded.",
        ),
        section(
            "Caches",
            table(["cache", "outcome", "reason"], uses),
            none="No lookup in a cache was recorded.",
        ),
        section(
            "Numbers",
            _metrics(single),
            ["div.columns", *numbers] if numbers else None,
            none="None was recorded.",
        ),
    ]


def _metrics(of: dict[str, Any]) -> Node:
    times = {n: v for n, v in of.items() if n.endswith("_s") and isinstance(v, (int, float))}
    return pairs((n, seconds(times[n]) if n in times else str(v)) for n, v in of.items())
