"""Tells what happened when: bars over time, events in words, and the trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from torchloom.files import write_whole
from torchloom.records import EventRow, Session
from torchloom.records.summary import count
from torchloom.report.page.elements import number, rounded, seconds, size
from torchloom.report.page.index import EntryItem, Index, Lane, nested
from torchloom.report.page.run_time import MeasuredSteps, begin_of, moved_layer, params_of

_COLOURS = {
    "forward": "c3", "backward": "c4", "step": "c5", "gather": "c0", "reduce": "c1", "sync": "c2", "exchange": "c2",
}  # fmt: skip
_MOST_MOVE_LANES = 12
_COMPILE_DEPTH = 5
"""Lanes of a compile where nothing else is shown; each entry has a chart of all its spans."""
_MAX_VALUE = 300
Data = Mapping[str, Any]
Bar = dict[str, Any]
"""lane, start, end, name, color, title; `thin` where other work goes on beside it."""


def timeline(index: Index, run: MeasuredSteps) -> dict[str, Any]:
    """Return the lanes and bars of a record, its steps, and which of them come after the last compile."""
    groups = list(run_bars(index, run, _MOST_MOVE_LANES).items())
    depth = 1 if run.all_phases or run.all_moves else _COMPILE_DEPTH
    compiles = [
        _span(
            s,
            f" of entry {item.name} of {item.owner.name}",
            "" if s.lane else f"compile {item.name}",
        )
        for item in index.entries
        for s in nested(item.entry)
        if s.lane < depth
    ]
    groups.insert(1 if run.all_phases else 0, ("compile", compiles))
    lanes: list[str] = []
    bars: list[Bar] = []
    for name, own in groups:
        bars += [bar | {"lane": bar["lane"] + len(lanes)} for bar in own]
        lanes += [name, *[""] * max(bar["lane"] for bar in own)] if own else []
    steady = run.all.index(run.steady[0]) if run.steady else None
    return {"lanes": lanes, "bars": bars, "steps": [list(s) for s in run.all], "steady": steady}


def compile_bars(item: EntryItem) -> list[Bar]:
    """Return the spans of an entry's compile."""
    return [_span(span) for span in nested(item.entry)]


def run_bars(index: Index, run: MeasuredSteps, most_lanes: int) -> dict[str, list[Bar]]:
    """Return what a run consists of beside its compiles, by sort; lanes count from 0 in each.

    Args:
        index: of the record.
        run: its steps.
        most_lanes: of one sort of collectives; of more at once, the rest lie on the last.
    """
    found = {
        "phases": [_phase(run, d) for d in run.all_phases],
        "torchloom": [bar for row in index.session.events for bar in _own_work(row)],
    }
    for op in sorted({d["op"] for d in run.all_moves}):
        found[op] = _placed(op, [d for d in run.all_moves if d["op"] == op], most_lanes)
    return {name: own for name, own in found.items() if own}


def event_rows(events: list[EventRow], run: MeasuredSteps) -> list[tuple[str, str, str]]:
    """Return when each event began, its name and what it tells."""
    first = min(map(begin_of, events), default=0.0)

    def when(row: EventRow) -> str:
        at = begin_of(row)
        own = run.at(at)
        # Outside of all steps: from the start of the record.
        return f"step {own.step} + {seconds(at - own.start)}" if own else seconds(at - first)

    return [(when(row), _WORDS.get(row.kind, (row.kind,))[0], event_text(row)) for row in events]


def event_text(row: EventRow) -> str:
    """Return what happened; of an event that is not known here, or is damaged, its fields."""
    try:
        return _WORDS[row.kind][1](row.data)
    except (KeyError, TypeError, ValueError, AttributeError):
        told = {key: value for key, value in row.data.items() if value is not None}
        shown = {key: json.dumps(value, default=str)[:_MAX_VALUE] for key, value in told.items()}
        return ", ".join(f"{key} {value}" for key, value in shown.items())


def carried(d: Data) -> str:
    """Return in few words what a collective carries: a parameter, a layer, from which to which."""
    params = params_of(d)
    if len(params) > 1:
        return f"{moved_layer(params)} ({len(params)} parameters)"
    return params[0] if params else count(d["num_tensors"], "tensor")


def _bar(lane: int, start: float, end: float, name: str, color: str, title: str) -> Bar:
    return {"lane": lane, "start": start, "end": end, "name": name, "color": color, "title": title}


def _phase(run: MeasuredSteps, d: Data) -> Bar:
    step, phase, start = int(d["step"]) + 1, d["phase"], d["start_s"]
    is_evaluation = phase == "forward" and run.all and run.at(start) is None
    name = "evaluate" if is_evaluation else f"{phase} {step}"
    title = f"step {step}, {'evaluation' if is_evaluation else phase}: {seconds(d['duration_s'])}"
    return _bar(0, start, start + d["duration_s"], name, _COLOURS.get(phase, "c5"), title)


def _span(span: Lane, where: str = "", name: str = "") -> Bar:
    color = "c5" if name else f"c{crc32(span.name.encode()) % 6}"
    title = f"{span.name}{where}: {seconds(span.end - span.start)}"
    return _bar(span.lane, span.start, span.end, name or span.name, color, title)


def _own_work(row: EventRow) -> list[Bar]:
    """Return the bar of a pass or of what measures operators: they tell when they ended and how long they took."""
    long = number(row.data.get("duration_s"))
    if row.kind not in ("PassRan", "PlanReviewed") or not long:
        return []
    name = str(row.data.get("name")) if row.kind == "PassRan" else "measure"
    color = "c2" if row.data.get("num_edits") else "c5"
    title = f"{_WORDS[row.kind][0]}: {event_text(row)}"
    return [_bar(0, row.at_s - long, row.at_s, name, color, title)]


def _placed(op: str, moves: Sequence[Data], most_lanes: int) -> list[Bar]:
    """Return collectives of a sort; those that overlap lie on lanes below each other."""
    free: list[float] = []
    found = []
    for d in moves:
        lane = next((i for i, end in enumerate(free) if end <= d["start_s"]), len(free))
        lane = min(lane, most_lanes - 1)
        if lane == len(free):
            free.append(0.0)
        free[lane] = max(d["end_s"], free[lane])
        is_waited = d["end_s"] > d["wait_s"]
        name = carried(d) if params_of(d) else f"{op} {size(d['num_bytes'])}"
        color, title = _COLOURS.get(op, "c5"), _move_text(d)
        bar = _bar(lane, d["start_s"], d["end_s"], name, color, title)
        found.append(bar | {"thin": True, "nameEnd": d["wait_s"] if is_waited else d["end_s"]})
        if is_waited:
            found.append(_bar(lane, d["wait_s"], d["end_s"], "wait", color, title))
    return found


def _move_text(d: Data) -> str:
    waited = seconds(max(0.0, d["end_s"] - d["wait_s"]))
    return (
        f"{d['op']} of {carried(d)}, {size(d['num_bytes'])}: "
        f"{seconds(d['end_s'] - d['start_s'])}, of which waited {waited}"
    )


def _compared(d: Data) -> str:
    peak = f"peak {size(d['measured_peak_bytes'])}, predicted {size(d['predicted_peak_bytes'])}"
    took = d.get("measured_seconds")
    return peak if took is None else f"{peak}; forward and backward {seconds(took)}"


def _skipped(d: Data) -> str:
    first = f", first {d['value']} in {d['param']} on rank {d['rank']}" if d.get("param") else ""
    return f"step {d['step']}: gradients not finite{first}"


def _step(d: Data) -> str:
    tokens, loss = d.get("tokens_per_second"), d.get("loss")
    told = [
        f"step {d['step']} in {seconds(d['seconds'])}",
        "" if loss is None else f"loss {rounded(loss)}",
        "" if tokens is None else f"{rounded(tokens)} tokens/s",
        count(d["recompiles"], "recompile") if d.get("recompiles") else "",
        "skipped" if d.get("skipped") else "",
    ]
    return ", ".join(filter(None, told))


def _timed(d: Data, what: str) -> str:
    return f"{what} in {seconds(d['duration_s'])}"


_WORDS: dict[str, tuple[str, Callable[[Data], str]]] = {
    "PassRan": (
        "pass",
        lambda d: _timed(d, f"{d['name']} on {d['graph']}: {count(d['num_edits'], 'edit')}"),
    ),
    "BodyWoven": (
        "layers as one body",
        lambda d: f"{count(len(d['layers']), 'call')} of {d['name']} in {d['graph']}, {d['half']}",
    ),
    "ProgramReady": (
        "program",
        lambda d: f"{d['model']} {d['origin']} in {seconds(d['seconds'])}",
    ),
    "PassesSkipped": ("not woven", lambda d: f"the model runs eagerly sharded: {d['reason']}"),
    "CompileStarted": (
        "compile begins",
        lambda d: f"{d['graph']}, {count(d['num_nodes'], 'node')}",
    ),
    "CompileFinished": (
        "compiled",
        lambda d: _timed(d, d["graph"]) + (", from a cache" if d.get("from_cache") else ""),
    ),
    "LoweredCompiled": ("code", lambda d: _timed(d, f"{d['lowered']} of {d['graph']}")),
    "PlanReviewed": (
        "plan reviewed",
        lambda d: (
            f"{_timed(d, 'operators measured')}; the plan "
            f"{'changes' if d.get('changes') else 'stays'}"
        ),
    ),
    "BackendChosen": (
        "backend",
        lambda d: "; ".join(
            [d["backend"], *(f"{name} failed: {why}" for name, why in d.get("failed") or [])]
        ),
    ),
    "CollectiveRan": ("collective", _move_text),
    "PhaseRan": (
        "phase",
        lambda d: _timed(
            d, f"{'optimizer' if d['phase'] == 'step' else d['phase']} of step {d['step'] + 1}"
        ),
    ),
    "StepSkipped": ("step skipped", _skipped),
    "StepEnded": ("step", _step),
    "PlanCompared": ("plan compared", _compared),
}
"""Per kind: its name, and what one event tells."""


_MOST_LANES = 100
"""Of collectives at once: more are no timeline that can be read."""


def to_trace(session: Session) -> dict[str, Any]:
    """Return the trace in the Trace Event Format: times in microseconds, the rank as process.

    Compile spans get a track per entry, training phases one, collectives as many as overlap.
    """
    rank = session.rank

    def name(track: int, what: str, text: str) -> dict[str, Any]:
        return {"ph": "M", "pid": rank, "tid": track, "name": what, "args": {"name": text}}

    rows = [name(0, "process_name", f"rank {rank} of {session.world_size}")]
    for track, (title, category, bars) in enumerate(_tracks(Index(session)), 1):
        rows.append(name(track, "thread_name", title))
        rows += [
            {"ph": "X", "pid": rank, "tid": track, "cat": category, "name": bar["name"],
             "ts": bar["start"] * 1e6, "dur": max(0.0, (bar["end"] - bar["start"]) * 1e6),
             "args": {"what": bar["title"]}}
            for bar in bars
        ]  # fmt: skip
    other = {"torchloom": session.torchloom, "torch": session.torch, "device": session.device}
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": other}


def write_trace(session: Session, path: str | Path) -> Path:
    """Write the trace as JSON; readers see the whole file or none.

    Args:
        session: the record.
        path: of the file; folders above it are made.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written.
    """
    return write_whole(path, json.dumps(to_trace(session), ensure_ascii=True))


def _tracks(index: Index) -> Iterator[tuple[str, str, list[Bar]]]:
    """Yield name, category and bars of each track; what lies inside another bar shares its track."""
    for name, bars in run_bars(index, MeasuredSteps(index), _MOST_LANES).items():
        lanes = range(1 + max(bar["lane"] for bar in bars))
        for lane in lanes:
            title = f"{name} {lane + 1}" if len(lanes) > 1 else name
            yield title, name, [bar for bar in bars if bar["lane"] == lane]
    for item in index.entries:
        if bars := compile_bars(item):
            yield f"compile {item.name} {item.owner.name}", "compile", bars
