"""The views of an entry, the graphs and passes of which the page's script draws."""

from __future__ import annotations

import re
from typing import Any

from torchloom.records import Artifact, Entry, Guard, Kernel
from torchloom.report.page.advice import actual_value
from torchloom.report.page.elements import (
    Node,
    choice,
    count,
    el,
    empty,
    link,
    pairs,
    prose,
    seconds,
    section,
    size,
    table,
)  # fmt: skip
from torchloom.report.page.index import EntryItem, Index
from torchloom.report.page.timeline import compile_bars

_MAX_GUARD = 500
"""Letters of a condition that are shown."""
_GLOBAL_STATE = frozenset(
    {"GLOBAL_STATE", "TORCH_FUNCTION_MODE_STACK", "DEFAULT_DEVICE", "DETERMINISTIC_ALGORITHMS",
     "GRAD_MODE"}
)  # fmt: skip


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
    """Those about arguments come first: they are the ones that fail."""
    if not entry.guards:
        return empty("No guard was recorded for this entry.")
    time = entry.guard_check_us
    rows: list[list[Node]] = [
        [
            ["div", ["div", prose(g.english or g.text)], ["code.sub.wrap", _cut(g.text)]],
            ["code", g.kind],
            ["code.wrap", index.short(g.user_line or "")],
            ["span.tag.bad", str(g.num_fails)] if g.num_fails else "0",
        ]
        for g in sorted(entry.guards, key=lambda g: (_guard_rank(g), -g.num_fails))
    ]
    checked = "" if time is None else f"; checking all takes {time:.1f} µs"
    columns = ["condition", "kind", "user line", "#calls rejected"]
    told = f"{count(len(rows), 'guard')}{checked}"
    return ["", ["p.told", told], table(columns, rows, "guards")]


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_GUARD else f"{text[:_MAX_GUARD]} ..."


def _guard_rank(guard: Guard) -> int:
    if guard.kind in _GLOBAL_STATE or guard.source == "L":
        return 5
    is_tensor = re.match(r"TENSOR_MATCH|SHAPE_ENV|EQUALS_MATCH|CONSTANT_MATCH", guard.kind)
    rest = 0 if is_tensor else 1
    if re.search(r"^L\['self'\]|__self__|_modules", guard.source):
        return 2 + rest
    is_argument = guard.source.startswith("L[") or not guard.source
    return rest if is_argument and not guard.text.startswith(("G[", "torch.")) else 4


def _kernels(kernels: list[Kernel]) -> Node:
    folds: list[Node] = []
    for kernel in kernels:
        lines = count(len(kernel.source.rstrip().split("\n")), "line")
        is_cpp = re.search(r"c\+\+|cpp", kernel.language, re.IGNORECASE)
        computes = f"Computes: {', '.join(kernel.nodes)}"
        title: Node = ["", ["code", kernel.name], ["span.faint", f" {kernel.language}, {lines}"]]
        text = _text(kernel.source, kernel.name, "cpp" if is_cpp else "python")
        told = computes if kernel.nodes else "Which nodes it computes is not known."
        body: Node = ["", ["p.told", told], text]
        folds.append({"is": "Fold", "title": title, "body": body, "isFirst": not folds})
    none = "No kernel was generated: the backend generates none, or each operator calls a library."
    return ["", *folds] if folds else empty(none)


def _code(entry: Entry) -> Node:
    kinds = ("output_code", "runnable")
    found = [each for kind in kinds for each in entry.artifacts if each.kind == kind]
    if not found:
        return empty(
            "No generated code was recorded: the backend wrote none, or the entry came from a cache."
        )
    return choice("Text", [(each.title or each.kind, _artifact(each)) for each in found], 0)


def _artifact(each: Artifact) -> Node:
    cut = empty(f"Shortened: the whole text has {size(each.num_bytes)}.") if each.is_cut else None
    return el("", cut, _text(each.text, each.title, "python"))


def _text(text: str, label: str, language: str) -> Node:
    return {"is": "Searchable", "text": text, "label": label, "language": language}


def _bytecode(index: Index, item: EntryItem) -> Node:
    """Before and after Dynamo, and what follows a graph break."""
    entry = item.entry
    if not (entry.pseudo_source or entry.bytecode):
        return empty("No bytecode was recorded for this entry.")

    def listing(text: str, label: str) -> Node:
        missing = "It was not recorded."
        return {"is": "Code", "text": text, "label": label, "language": "plain", "missing": missing}

    missing = "The bytecode could not be read back as source."
    what = {"is": "Code", "text": entry.pseudo_source, "label": "pseudo source", "missing": missing}
    original = listing(entry.original_bytecode, "original bytecode")
    return el(
        "",
        section("What it does", what),
        _continuations(index, item),
        [
            "div.beside",
            section("Bytecode that Python compiled", original),
            section("Bytecode that Dynamo wrote", listing(entry.bytecode, "bytecode")),
        ],
    )


def _head(index: Index, item: EntryItem) -> Node:
    entry = item.entry
    backend: Node = entry.backend
    if len(entry.backend) > 90:
        short = entry.backend.partition("(")[0]
        backend = ["details", ["summary", short], ["code.wrap", entry.backend]]
    facts = pairs(
        [
            ("function", item.owner.link()),
            ("backend", backend),
            ("status", "live" if entry.status == "live" else ["span.tag.warn", entry.status]),
            ("calls served", item.calls),
            ("compile time", seconds(item.compile_s)),
            ("attempts", str(entry.attempts) if entry.attempts > 1 else None),
        ],
        ".facts",
    )
    return ["", facts, _trigger(entry), _stack(index, entry)]


def _trigger(entry: Entry) -> Node:
    """The arguments of the call that made the entry: tensors and constants before mere types."""
    rows = sorted(entry.trigger.items(), key=lambda row: bool(re.match(r"an? `", row[1])))
    if not rows:
        return None
    first = "; ".join(f"{name} {value}" for name, value in rows[:2])
    brief = prose(first + ("; ..." if len(rows) > 2 else ""))
    told = pairs((["code", name], prose(value)) for name, value in rows)
    return ["details.trigger", ["summary", "Made by a call with ", brief], told]


def _stack(index: Index, entry: Entry) -> Node:
    """The calls of the user's code that led to the compile."""
    if not entry.stack:
        return None
    calls = [["code", index.short(call)] for call in entry.stack]
    rows = [["li", call] for call in calls]
    summary = ["summary", "Compiled in the call at ", calls[-1]]
    return ["details.trigger.stack-of-calls", summary, ["ol", *rows]]


def _recompile(item: EntryItem) -> Node:
    rejected = item.entry.recompiles
    if not rejected:
        first = "This is the first entry of its function: nothing was recompiled for it."
        unknown = "Why older entries could not serve was not recorded."
        return empty(first if item.owner.entries[0] is item else unknown)
    older = {
        each.entry.compile_id: each
        for each in item.owner.entries
        if each.entry.epoch == item.entry.epoch
    }
    rows: list[list[Node]] = [
        [
            link(older[each.entry].address(), each.entry) if each.entry in older else each.entry,
            each.source,
            ["code", each.expected],
            ["code", actual_value(each, item)],
            ["code.sub.wrap", each.text],
        ]
        for each in rejected
    ]
    fixes = dict.fromkeys(each.fix for each in rejected if each.fix)
    return [
        "",
        ["p", "This entry was made because no older one could serve the call."],
        table(["older entry", "rejected for", "expected", "came as", "check"], rows),
        section("Fix", ["ul", *(["li", prose(fix)] for fix in fixes)]) if fixes else None,
    ]


def _times(item: EntryItem) -> Node:
    entry = item.entry
    colours = {"hit": "good", "miss": "warn"}
    uses: list[list[Node]] = [
        [use.cache, [f"span.tag.{colours.get(use.outcome, 'info')}", use.outcome], use.reason]
        for use in entry.caches
    ]
    caches = table(["cache", "outcome", "reason"], uses)
    parts = [(name, of) for name, of in entry.metrics.items() if isinstance(of, dict)]
    single = [(name, of) for name, of in entry.metrics.items() if not isinstance(of, dict)]
    numbers: list[Node] = [
        pairs(_metric(*row) for row in single),
        ["div.columns", *(["div", ["h3", n], pairs(_metric(*row) for row in of.items())]
                          for n, of in parts)],
    ]  # fmt: skip
    none = [empty("None was recorded.")]
    flame: Node = {"is": "Flame", "bars": compile_bars(item)}
    return [
        "",
        section("Phases", flame if entry.spans else empty("No compile spans were recorded.")),
        section("Caches", caches if uses else empty("No lookup in a cache was recorded.")),
        section("Numbers", *(numbers if entry.metrics else none)),
    ]


def _metric(name: str, value: Any) -> tuple[Node, Node]:
    is_time = name.endswith("_s") and isinstance(value, (int, float))
    return name, seconds(value) if is_time else str(value)


def _continuations(index: Index, item: EntryItem) -> Node:
    found: list[Node] = []
    for i, each in enumerate(item.entry.continuations, 1):
        known = [f for f in index.functions if f.parent and f.fn.name == each.function]
        rest = re.match(r"torch_dynamo_resume_in_(.+)_at_\d+$", each.function)
        name = f"{rest[1]}, from line {each.line} on" if rest else each.function
        taken: list[Node] = [["span.tag.warn", "not compiled: not taken, or it holds no operator"]]
        if each.num_entries:
            versions = f": {count(each.num_entries, 'compiled version')}"
            taken = [["span.tag.good", "taken"], versions]
        missing = "Its bytecode could not be read back as source."
        text = {
            "is": "Code",
            "text": each.source,
            "label": f"source of {each.name}",
            "missing": missing,
        }
        head = ["h3", f"{i}. ", known[0].link() if known else name, " ", *taken]
        found.append(["article.continuation", head, text])
    if not found:
        return None
    return section("What follows its graph break, in the order of the calls", *found)
