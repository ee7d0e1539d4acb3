"""Bars over time: phases and collectives of a run beside compiles and passes, and the spans of a compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

from torchloom.report.page.elements import count, seconds, size
from torchloom.report.page.events import move_text, what_moves
from torchloom.report.page.figures import number
from torchloom.report.page.index import EntryItem, Index, Lane, nested
from torchloom.report.page.steps import (
    MeasuredSteps,
    in_order,
    is_evaluation,
    params_of,
)  # fmt: skip

_PHASES = {"forward": "c3", "backward": "c4", "step": "c5"}
_MOVES = {"gather": "c0", "reduce": "c1", "sync": "c2"}
_MOST_MOVE_LANES = 12
_COMPILE_DEPTH = 5
"""Lanes of a compile where nothing else is shown; each entry has a chart of all its spans."""
Bar = dict[str, Any]
"""lane, start, end, name, color, title; `thin` where other work goes on beside it."""


def timeline(index: Index, run: MeasuredSteps) -> dict[str, Any]:
    """Return the lanes and bars of a record, its steps, and which of them come after the last compile."""
    groups = list(run_bars(index, run, _MOST_MOVE_LANES).items())
    is_run = bool(run.all_phases or run.all_moves)
    depth = 1 if is_run else _COMPILE_DEPTH
    compiles = [bar for item in index.entries for bar in _compile(item, depth)]
    groups.insert(1 if run.all_phases else 0, ("compile", compiles))
    lanes: list[str] = []
    bars: list[Bar] = []
    for name, own in groups:
        bars += [bar | {"lane": bar["lane"] + len(lanes)} for bar in own]
        lanes += [name, *[""] * max(bar["lane"] for bar in own)] if own else []
    return {
        "lanes": lanes,
        "bars": bars,
        "steps": [[step.step, step.start, step.end] for step in run.all],
        "steady": run.all.index(run.steady[0]) if run.steady else None,
    }


def compile_bars(item: EntryItem) -> list[Bar]:
    """Return the spans of an entry's compile."""
    return [_span(span, span.name, "") for span in nested(item.entry)]


def run_bars(index: Index, run: MeasuredSteps, most_lanes: int) -> dict[str, list[Bar]]:
    """Return what a run consists of beside its compiles, by sort; lanes count from 0 in each.

    Args:
        index: of the record.
        run: its steps.
        most_lanes: of one sort of collectives; of more at once, the rest lie on the last.
    """
    moves = run.all_moves
    found = {"phases": _phases(run.all_phases), "torchloom": _own_work(index)}
    for op in sorted({d["op"] for d in moves}):
        found[op] = _placed(op, [d for d in moves if d["op"] == op], most_lanes)
    return {name: own for name, own in found.items() if own}


def _bar(lane: int, start: float, end: float, name: str, color: str, title: str) -> Bar:
    return {"lane": lane, "start": start, "end": end, "name": name, "color": color, "title": title}


def _phases(phases: Sequence[Any]) -> list[Bar]:
    found, ordered = [], in_order(phases)
    for i, d in enumerate(ordered):
        step, phase, start = d["step"] + 1, d["phase"], d["start_s"]
        is_eval = is_evaluation(ordered, i)
        name = "evaluate" if is_eval else f"{phase} {step}"
        what = "forward without backward" if is_eval else phase
        title = f"step {step}, {what}: {seconds(d['duration_s'])}"
        found.append(_bar(0, start, start + d["duration_s"], name, _PHASES.get(phase, "c5"), title))
    return found


def _span(span: Lane, name: str, where: str, color: str = "") -> Bar:
    color = color or f"c{crc32(span.name.encode()) % 6}"
    title = f"{span.name}{where}: {seconds(span.end - span.start)}"
    return _bar(span.lane, span.start, span.end, name, color, title)


def _compile(item: EntryItem, depth: int) -> list[Bar]:
    where = f" of entry {item.name} of {item.owner.name}"
    return [
        _span(s, s.name, where) if s.lane else _span(s, f"compile {item.name}", where, "c5")
        for s in nested(item.entry)
        if s.lane < depth
    ]


def _own_work(index: Index) -> list[Bar]:
    """Passes, and what measures operators, tell when they ended and how long they took."""
    found = []
    for row in index.session.events:
        d, long = row.data, number(row.data.get("duration_s"))
        if row.kind == "PassRan" and long:
            edits = int(number(d.get("num_edits")) or 0)
            title = (
                f"pass {d.get('name')} on {d.get('graph')}: {seconds(long)}, {count(edits, 'edit')}"
            )
            color = "c2" if edits else "c5"
            found.append(_bar(0, row.at_s - long, row.at_s, str(d.get("name")), color, title))
        elif row.kind == "PlanReviewed" and long:
            plan = f"the plan {'changes' if d.get('changes') else 'stays'}"
            title = f"operators are measured, for the plan: {seconds(long)}; {plan}"
            found.append(_bar(0, row.at_s - long, row.at_s, "measure", "c4", title))
    return found


def _placed(op: str, moves: Sequence[Any], most_lanes: int) -> list[Bar]:
    """Return collectives of a sort; those that overlap lie on lanes below each other."""
    free: list[float] = []
    found = []
    for d in in_order(moves):
        lane = next((i for i, end in enumerate(free) if end <= d["start_s"]), len(free))
        lane = min(lane, most_lanes - 1)
        if lane == len(free):
            free.append(0.0)
        free[lane] = max(d["end_s"], free[lane])
        is_waited = d["end_s"] > d["wait_s"]
        name = what_moves(d) if params_of(d) else f"{op} {size(d['num_bytes'])}"
        color, title = _MOVES.get(op, "c5"), move_text(d)
        bar = _bar(lane, d["start_s"], d["end_s"], name, color, title)
        found.append(bar | {"thin": True, "nameEnd": d["wait_s"] if is_waited else d["end_s"]})
        if is_waited:
            found.append(_bar(lane, d["wait_s"], d["end_s"], "wait", color, title))
    return found
