"""The first view: where the time and the memory went, what to mend first, what was compiled."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from torchloom.records import Session
from torchloom.report.page.advice import fix_first, has_fixes, limit_text
from torchloom.report.page.elements import (
    Node,
    count,
    el,
    empty,
    link,
    pairs,
    percent,
    seconds,
    section,
    table,
)  # fmt: skip
from torchloom.report.page.figures import RunFigures
from torchloom.report.page.headline import headline
from torchloom.report.page.index import FunctionItem, Index, nested
from torchloom.report.page.run_memory import run_memory
from torchloom.report.page.run_plan import run_plan
from torchloom.report.page.run_time import exposed_communication, own_phases, run_time
from torchloom.report.page.steps import MeasuredSteps, told

_WORDS = (
    "A function is compiled into entries: each is one compiled version, with guards that say for "
    "which calls it may be used. A call that fits none makes a recompile; a graph break cuts a "
    "function into pieces that are compiled apart."
)
_ENTRIES_LINKED = 6
_ASSUMED_SHOWN = 40
_PHASES_SHOWN = 14
_COSTS = {"tap_ms": "listening to torch's log", "build_ms": "making the record"}


def overview(index: Index, run: RunFigures | None, steps: MeasuredSteps) -> Node:
    """Return the first view of a record."""
    session = index.session
    fixes, is_urgent = fix_first(index), has_fixes(index)
    return el(
        "",
        headline(run) if run else None,
        _cards(index, steps),
        None if told(session, "PhaseRan") else ["p.told", _WORDS],
        fixes if is_urgent else None,
        _beside(run_time(steps), run_memory(session)),
        exposed_communication(steps),
        _beside(run_plan(session), own_phases(index)),
        None if is_urgent else fixes,
        _programs(session),
        section("Functions", _functions(index)),
        _skipped(index),
        section("Compile time by phase", _phases(index)),
        [
            "div.columns",
            section("Versions and machine", _versions(session)),
            section("Settings that are not at their defaults", *_settings(session.config)),
            section("What watching cost", _overhead(session)),
        ],
        *_rest(session),
    )


def _beside(*parts: Node) -> Node:
    """Next to each other where the screen is wide enough."""
    return el("div.pair" if all(parts) else "", *parts)


def _cards(index: Index, steps: MeasuredSteps) -> Node:
    cards: list[Node] = []

    def card(value: int | str, one: str, many: str = "", is_bad: bool = False) -> None:
        kind = "div.card.bad" if is_bad and value else "div.card"
        cards.append([kind, ["strong", str(value)], ["span", one if value == 1 else many or one]])

    uses = [use for item in index.entries for use in item.entry.caches]
    eager, exposed = index.session.num_eager_calls, steps.exposed_share()
    recompiles = sum(max(0, len(item.entries) - 1) for item in index.functions)
    card(len(index.functions), "function", "functions")
    card(len(index.entries), "entry", "entries")
    card(len(index.breaks), "graph break", "graph breaks", is_bad=True)
    card(recompiles, "recompile", "recompiles", is_bad=True)
    if eager:
        card(eager, "call ran eagerly", "calls ran eagerly", is_bad=True)
    card(seconds(sum(item.compile_s for item in index.entries)), "compiling")
    if uses:
        card(f"{sum(u.outcome == 'hit' for u in uses)} of {len(uses)}", "cache lookups hit")
    if exposed is not None:
        card(percent(exposed, 1), "of a step is exposed communication")
    return ["div.cards", *cards]


def _programs(session: Session) -> Node:
    """Programs for ranges of sizes: for which, of how many graphs, and on what they rely."""
    lists = ("boxes", "num_calls", "verdicts")
    found = [
        p
        for p in told(session, "ProgramReady", "seconds", "num_graphs")
        if all(isinstance(p.get(name), (list, tuple)) for name in lists)
    ]
    return section("Programs for ranges of sizes", *map(_program, found)) if found else None


def _program(p: dict[str, Any]) -> Node:
    boxes, verdicts = list(p["boxes"]), list(p["verdicts"])
    graphs = count(p["num_graphs"], "different graph")
    lead = (
        f"{p.get('origin')} in {seconds(p['seconds'])}: {count(len(boxes), 'program')} of {graphs}; "
        "no call compiles anything. "
    )
    rows = [[str(box), str(num)] for box, num in zip(boxes, p["num_calls"], strict=False)]
    assumed = empty("Nothing was assumed of sizes.")
    if verdicts:
        more = len(verdicts) - _ASSUMED_SHOWN
        items: list[Node] = [["li.wrap", str(text)] for text in verdicts[:_ASSUMED_SHOWN]]
        title = f"{count(len(verdicts), 'assumption')} about sizes, and for which they hold"
        rest = ["li", f"and {more} more in the record"] if more > 0 else None
        assumed = ["details", ["summary", title], el("ul", *items, rest)]
    return [
        "div.program",
        ["h3", str(p.get("model"))],
        ["p.told", lead],
        pairs(
            [
                ("contract", ["code.wrap", str(p.get("contract"))]),
                ("name in the store", ["code.wrap", str(p["key"])] if p.get("key") else None),
            ]
        ),
        table(["sizes", "#graphs run in a call"], rows),
        assumed,
    ]


def _functions(index: Index) -> Node:
    if not index.functions:
        return empty(
            "No function was compiled while watching. Was the compiled function called inside the "
            "watch?"
        )
    rows: list[list[Node]] = [
        [
            ["span", "\u2003" * item.depth + "↳ " if item.depth else "", item.link(),
             ["span.faint", f" {index.place(item.fn)}"]],
            _status(index, item),
            _entry_links(item),
            str(item.fn.num_hits),
            seconds(sum(each.compile_s for each in item.entries)),
        ]
        for item in index.functions
    ]  # fmt: skip
    return table(["function", "status", "entries", "#calls served", "#compile time"], rows)


def _entry_links(item: FunctionItem) -> Node:
    links: list[Node] = []
    for each in item.entries[:_ENTRIES_LINKED]:
        links += [link(each.address(), each.name), " "]
    more = len(item.entries) - _ENTRIES_LINKED
    return el("span", *(links or ["none"]), f"and {more} more" if more > 0 else "")


def _status(index: Index, item: FunctionItem) -> Node:
    limit, fn = limit_text(item.fn), item.fn
    if limit:
        return ["span.tag.bad", limit]
    if fn.skipped:
        return ["span.tag.warn", f"runs eagerly: {fn.skipped}"]
    dead = [entry.status for entry in fn.entries if entry.status != "live"]
    breaks = sum(each.owner is item for each in index.breaks)
    tags = []
    if breaks:
        tags.append(["span.tag.bad", count(breaks, "graph break")])
    if dead:
        text = dead[0] if len(dead) == 1 else f"{len(dead)} entries not live"
        tags.append(["span.tag.warn", text])
    if len(fn.entries) > 1:
        tags.append(["span.tag.warn", count(len(fn.entries) - 1, "recompile")])
    return ["span", *(part for tag in tags or [["span.tag.good", "live"]] for part in (tag, " "))]


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
    shown = table(["function", "why", "#entries"], rows, "skipped")
    return section("Functions that run eagerly", shown) if rows else None


def _phases(index: Index) -> Node:
    """Over all entries: the time in each phase, without the phases inside it."""
    sums: dict[str, float] = {}
    for span in (span for item in index.entries for span in nested(item.entry)):
        sums[span.name] = sums.get(span.name, 0.0) + max(0.0, span.own_s)
    if not sums:
        return empty("No compile spans were recorded, so time cannot be told by phase.")
    ordered = sorted(sums.items(), key=lambda row: -row[1])
    rest = sum(value for _, value in ordered[_PHASES_SHOWN:])
    if rest:
        ordered[_PHASES_SHOWN:] = [(f"{len(ordered) - _PHASES_SHOWN} others", rest)]
    total, most = sum(sums.values()), max(value for _, value in ordered) or 1
    bars: list[Node] = []
    for name, value in ordered[: _PHASES_SHOWN + 1]:
        told_of = f"{seconds(value)}  {100 * value / (total or 1):.0f}%"
        bar = {"is": "Bar", "share": 100 * value / most}
        bars += [["span.bar-name", name], bar, ["span.num", told_of]]
    lead = (
        "Time in each phase itself, without the phases inside it, over all entries. Each entry has "
        "a flame chart of its own."
    )
    return ["", ["p.told", lead], ["div.bars", *bars]]


def _versions(session: Session) -> Node:
    started = ""
    if session.started_at_s:
        at = datetime.fromtimestamp(session.started_at_s, timezone.utc)
        started = f"{at:%Y-%m-%d %H:%M:%S} UTC"
    return pairs(
        [
            ("torchloom", session.torchloom),
            ("torch", session.torch),
            ("Python", session.python),
            ("platform", session.platform),
            ("device", session.device),
            ("rank", f"{session.rank} of {session.world_size}"),
            ("watched for", seconds(session.duration_s)),
            ("started", started),
            ("resets of Dynamo", str(session.num_resets)),
        ]
    )


def _settings(config: dict[str, Any]) -> list[Node]:
    if not config:
        return [empty("None: Dynamo and Inductor ran with their defaults.")]
    found: list[Node] = []
    for name, value in config.items():
        lines = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            lines = [f"{key} = {each}" for key, each in value.items()]
        found += [["h3", name], ["pre.text", "\n".join(map(str, lines))]]
    return found


def _overhead(session: Session) -> Node:
    rows = []
    for key, value in session.overhead.items():
        if key.endswith("_dropped"):
            rows.append((f"{key.removesuffix('_dropped')} left out", str(value)))
        else:
            name = _COSTS.get(key, key.removesuffix("_ms").replace("_", " "))
            rows.append((name, seconds(value / 1e3)))
    return pairs(rows) if rows else empty("Not measured.")


def _rest(session: Session) -> list[Node]:
    logged = [["pre.text", text] for text in session.orphans]
    unread = [(name, str(num)) for name, num in session.unknown.items()]
    return [
        section("Logged about no function in particular", *logged) if logged else None,
        section("Trace records that this torchloom does not read", pairs(unread))
        if unread
        else None,
    ]
