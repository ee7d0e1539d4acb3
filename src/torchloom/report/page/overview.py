"""The first view: where the time and the memory went, what to mend first, what was compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from torchloom.records import Session
from torchloom.records.summary import count
from torchloom.report.page.advice import fix_first, limit_text
from torchloom.report.page.elements import (
    Node,
    el,
    empty,
    pairs,
    percent,
    seconds,
    section,
    table,
    told,
)  # fmt: skip
from torchloom.report.page.figures import RunFigures
from torchloom.report.page.headline import headline
from torchloom.report.page.index import FunctionItem, Index, nested
from torchloom.report.page.memory import run_memory, run_plan
from torchloom.report.page.owners import run_owners
from torchloom.report.page.run_time import (
    MeasuredSteps,
    exposed_communication,
    own_phases,
    rows_of,
    run_time,
)

_WORDS = (
    "A function is compiled into entries: each is one compiled version, with guards that say for "
    "which calls it may be used. A call that fits none makes a recompile; a graph break cuts a "
    "function into pieces that are compiled apart."
)
_PHASES = (
    "Time in each phase itself, without the phases inside it, over all entries. Each entry has "
    "a flame chart of its own."
)
_ENTRIES_LINKED = 6
_ASSUMED_SHOWN = 40
_PHASES_SHOWN = 14
_COSTS = {"tap_ms": "listening to torch's log", "build_ms": "making the record"}


def overview(index: Index, run: RunFigures | None, steps: MeasuredSteps) -> Node:
    """Return the first view of a record."""
    session = index.session
    fixes = fix_first(index)
    seen = "Nothing: no graph break and no recompile was seen."
    none = "Nothing was compiled while watching, so there is nothing to fix."
    to_fix = section("What to fix first", fixes, none=seen if index.entries else none)
    return el(
        "",
        headline(run) if run else None,
        ["div.cards", *_cards(index, steps)],
        None if rows_of(session, "PhaseRan") else told(_WORDS),
        to_fix if fixes else None,
        _beside(run_time(steps), run_memory(session)),
        exposed_communication(steps),
        _beside(run_plan(session), own_phases(index)),
        run_owners(session),
        None if fixes else to_fix,
        section("Programs for ranges of sizes", *_programs(session)),
        section(
            "Functions",
            _functions(index),
            none="No function was compiled while watching. Was the compiled function called inside "
            "the watch?",
        ),
        section("Functions that run eagerly", _skipped(index)),
        section(
            "Compile time by phase",
            _phases(index),
            none="No compile spans were recorded, so time cannot be told by phase.",
        ),
        [
            "div.columns",
            section("Versions and machine", _versions(session)),
            section(
                "Settings that are not at their defaults",
                *_settings(session.config),
                none="None: Dynamo and Inductor ran with their defaults.",
            ),
            section("What watching cost", _overhead(session), none="Not measured."),
        ],
        section(
            "Logged about no function in particular",
            *(["pre.text", text] for text in session.orphans),
        ),
    )


def _beside(*parts: Node) -> Node:
    """Next to each other where the screen is wide enough."""
    return el("div.pair" if all(parts) else "", *parts)


def _cards(index: Index, steps: MeasuredSteps) -> list[Node]:
    def card(value: int | str, what: str, is_bad: bool = False) -> Node:
        kind = "div.card.bad" if is_bad and value else "div.card"
        return [kind, ["strong", str(value)], ["span", what]]

    def counted(number: int, word: str, many: str = "", is_bad: bool = False) -> Node:
        return card(number, word if number == 1 else many or f"{word}s", is_bad)

    uses = [use for item in index.entries for use in item.entry.caches]
    hits = sum(use.outcome == "hit" for use in uses)
    eager, parts = index.session.num_eager_calls, steps.parts()
    cards = [
        counted(len(index.functions), "function"),
        counted(len(index.entries), "entry", "entries"),
        counted(len(index.breaks), "graph break", is_bad=True),
        counted(index.session.num_recompiles, "recompile", is_bad=True),
        counted(eager, "call ran eagerly", "calls ran eagerly", is_bad=True) if eager else None,
        card(seconds(sum(item.compile_s for item in index.entries)), "compiling"),
        card(f"{hits} of {len(uses)}", "cache lookups hit") if uses else None,
    ]
    if steps.steps:
        share = percent(parts["exposed"], sum(parts.values()))
        cards.append(card(share, "of a step is exposed communication"))
    return [each for each in cards if each]


def _programs(session: Session) -> list[Node]:
    """Programs for ranges of sizes: for which, of how many graphs, and on what they rely."""
    return [
        _program(p)
        for p in rows_of(session, "ProgramReady", "seconds", "num_graphs")
        if all(
            isinstance(p.get(name), (list, tuple)) for name in ("boxes", "num_calls", "verdicts")
        )
    ]


def _program(p: Mapping[str, Any]) -> Node:
    verdicts = list(map(str, p["verdicts"]))
    graphs = count(p["num_graphs"], "different graph")
    lead = (
        f"{p.get('origin')} in {seconds(p['seconds'])}: {count(len(p['boxes']), 'program')} of "
        f"{graphs}; no call compiles anything. "
    )
    more = len(verdicts) - _ASSUMED_SHOWN
    title = f"{count(len(verdicts), 'assumption')} about sizes, and for which they hold"
    rest = ["li", f"and {more} more in the record"] if more > 0 else None
    items = (["li.wrap", text] for text in verdicts[:_ASSUMED_SHOWN])
    return el(
        "div.program",
        ["h3", str(p.get("model"))],
        told(lead),
        pairs(
            [
                ("contract", ["code.wrap", str(p.get("contract"))]),
                ("name in the store", ["code.wrap", str(p["key"])] if p.get("key") else None),
            ]
        ),
        table(
            ["sizes", "#graphs run in a call"],
            [[str(box), str(num)] for box, num in zip(p["boxes"], p["num_calls"], strict=False)],
        ),
        ["details", ["summary", title], el("ul", *items, rest)]
        if verdicts
        else empty("Nothing was assumed of sizes."),
    )


def _functions(index: Index) -> Node:
    rows: list[list[Node]] = [
        [
            ["span", "\u2003" * item.depth + "↳ " if item.depth else "", item.link(),
             ["span.faint", f" {index.place(item.fn)}"]],
            ["span", *(part for tag in _status(index, item) for part in (tag, " "))],
            _entry_links(item),
            str(item.fn.num_hits),
            seconds(sum(each.compile_s for each in item.entries)),
        ]
        for item in index.functions
    ]  # fmt: skip
    return table(["function", "status", "entries", "#calls served", "#compile time"], rows)


def _entry_links(item: FunctionItem) -> Node:
    shown = item.entries[:_ENTRIES_LINKED]
    links = [part for each in shown for part in (each.link(), " ")]
    more = len(item.entries) - _ENTRIES_LINKED
    return el("span", *(links or ["none"]), f"and {more} more" if more > 0 else "")


def _status(index: Index, item: FunctionItem) -> list[Node]:
    limit, fn = limit_text(item.fn), item.fn
    if limit:
        return [["span.tag.bad", limit]]
    if fn.skipped:
        return [["span.tag.warn", f"runs eagerly: {fn.skipped}"]]
    dead = [entry.status for entry in fn.entries if entry.status != "live"]
    breaks = sum(each.owner is item for each in index.breaks)
    again = len(fn.entries) - 1
    tags: list[Node] = []
    if breaks:
        tags.append(["span.tag.bad", count(breaks, "graph break")])
    if dead:
        text = dead[0] if len(dead) == 1 else f"{len(dead)} entries not live"
        tags.append(["span.tag.warn", text])
    if again > 0:
        tags.append(["span.tag.warn", count(again, "recompile")])
    return tags or [["span.tag.good", "live"]]


def _skipped(index: Index) -> Node:
    """Functions of which nothing is compiled; those at their limit stand under what to fix."""
    rows: list[list[Node]] = [
        [
            ["span", item.link(), ["span.faint", f" {index.place(item.fn)}"]],
            ["span.wrap", item.fn.skipped],
            str(len(item.entries)),
        ]
        for item in index.functions
        if item.fn.skipped and not limit_text(item.fn)
    ]
    return table(["function", "why", "#entries"], rows, "skipped")


def _phases(index: Index) -> Node:
    """Over all entries: the time in each phase, without the phases inside it."""
    sums: Counter[str] = Counter()
    for span in (span for item in index.entries for span in nested(item.entry)):
        sums[span.name] += max(0.0, span.own_s)  # pyrefly: ignore
    if not sums:
        return None
    ordered = sums.most_common()
    others = [value for _, value in ordered[_PHASES_SHOWN:]]
    if others:
        ordered[_PHASES_SHOWN:] = [(f"{len(others)} others", sum(others))]
    most = max(value for _, value in ordered) or 1
    bars: list[Node] = []
    for name, value in ordered:
        bar = {"is": "Bar", "share": 100 * value / most}
        share = f"{seconds(value)}  {100 * value / (sums.total() or 1):.0f}%"
        bars += [["span.bar-name", name], bar, ["span.num", share]]
    return ["", told(_PHASES), ["div.bars", *bars]]


def _versions(session: Session) -> Node:
    at = datetime.fromtimestamp(session.started_at_s, timezone.utc)
    return pairs(
        [
            ("torchloom", session.torchloom),
            ("torch", session.torch),
            ("Python", session.python),
            ("platform", session.platform),
            ("device", session.device),
            ("rank", f"{session.rank} of {session.world_size}"),
            ("watched for", seconds(session.duration_s)),
            ("started", f"{at:%Y-%m-%d %H:%M:%S} UTC" if session.started_at_s else ""),
            ("resets of Dynamo", str(session.num_resets)),
        ]
    )


def _settings(config: Mapping[str, Any]) -> list[Node]:
    found: list[Node] = []
    for name, value in config.items():
        lines = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            lines = [f"{key} = {each}" for key, each in value.items()]
        found += [["h3", name], ["pre.text", "\n".join(map(str, lines))]]
    return found


def _overhead(session: Session) -> Node:
    def row(key: str, value: float) -> tuple[str, str]:
        if key.endswith("_dropped"):
            return f"{key.removesuffix('_dropped')} left out", str(value)
        return _COSTS.get(key, key.removesuffix("_ms").replace("_", " ")), seconds(value / 1e3)

    return pairs(row(*each) for each in session.overhead.items())
