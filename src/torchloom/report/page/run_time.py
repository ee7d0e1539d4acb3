"""Measures where the time of training steps and of compiling went, and which layers a step waited for."""

from __future__ import annotations

import itertools
import re
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torchloom.records import EventRow, Session
from torchloom.records.summary import count
from torchloom.report.page.elements import (
    Node,
    link,
    number,
    seconds,
    section,
    size,
    stacked,
    table,
    told,
)
from torchloom.report.page.index import Index

Data = Mapping[str, Any]
Stretch = tuple[float, float]
_PHASE = ("step", "start_s", "duration_s")
_MOVE = ("start_s", "wait_s", "end_s", "num_bytes", "num_tensors")


class Step(NamedTuple):
    """A step of the optimizer with its micro-steps; seconds on the clock of events."""

    step: int
    start: float
    end: float


class MeasuredSteps:
    """The steps after the last compile, where there are any; else all steps."""

    def __init__(self, index: Index) -> None:
        session = index.session
        phases, moves = (
            rows_of(session, "PhaseRan", *_PHASE),
            rows_of(session, "CollectiveRan", *_MOVE),
        )
        self.all_phases = in_order([d for d in phases if isinstance(d.get("phase"), str)])
        self.all_moves = in_order([d for d in moves if isinstance(d.get("op"), str)])
        self.all = sorted(_steps(session), key=lambda step: step.start)
        begins: dict[Step, float] = {}
        for d in self.all_phases:  # a step begins with its first phase, to the microsecond
            if step := self.at(d["start_s"] + d["duration_s"] / 2):
                begins.setdefault(step, d["start_s"])
        self.all = [step._replace(start=begins.get(step, step.start)) for step in self.all]
        spans = [span for item in index.entries for span in item.entry.spans]
        compiles = [(s.start_us / 1e6, (s.start_us + s.duration_us) / 1e6) for s in spans]
        ends = [end for _, end in compiles]
        ends += [row.at_s for row in session.events if row.kind == "CompileFinished"]
        last = max(ends, default=float("-inf"))
        self.steady = [step for step in self.all if step.start >= last]
        self.steps = self.steady or self.all
        kept = {*self.steps}
        self.phases = [d for d in self.all_phases if self.at(d["start_s"]) in kept]
        self.moves = [d for d in self.all_moves if self.at(d["wait_s"]) in kept]
        self._compiles = _merged(compiles)

    def at(self, seconds: float) -> Step | None:
        """Return the step that a time lies in."""
        i = bisect_right(self.all, seconds, key=lambda step: step.start) - 1
        return self.all[i] if i >= 0 and seconds <= self.all[i].end else None

    def parts(self) -> dict[str, float]:
        """Return mean seconds per step of each part; they add up to the step."""
        waits = _merged((d["wait_s"], d["end_s"]) for d in self.moves)
        sums = dict.fromkeys(("forward", "backward", "step", "exposed", "compile"), 0.0)
        sums["between"] = sum(step.end - step.start for step in self.steps)
        for d in self.phases:
            start, long = d["start_s"], d["duration_s"]
            compiling = _overlap(self._compiles, start, start + long)
            exposed = min(_overlap(waits, start, start + long), long - compiling)
            sums["compile"] += compiling
            sums["exposed"] += exposed
            sums[d["phase"]] = sums.get(d["phase"], 0.0) + long - compiling - exposed
            sums["between"] -= long
        return {name: max(0.0, total / (len(self.steps) or 1)) for name, total in sums.items()}


def rows_of(session: Session, kind: str, *numbers: str) -> list[dict[str, Any]]:
    """Return what events of a kind tell, of those that have these numbers."""
    rows = [row.data for row in session.events if row.kind == kind]
    return [d for d in rows if all(number(d.get(name)) is not None for name in numbers)]


def begin_of(row: EventRow) -> float:
    """Return when an event began; those without a begin tell when they ended."""
    begin = number(row.data.get("start_s"))
    return row.at_s if begin is None else begin


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return phases or collectives by their begin."""
    return sorted(rows, key=lambda d: d["start_s"])


def _steps(session: Session) -> Iterable[Step]:
    """Yield the steps from the begin of their first forward on."""
    for row in session.events:
        step, seconds = number(row.data.get("step")), number(row.data.get("seconds"))
        if row.kind == "StepEnded" and step is not None and seconds is not None:
            waited = number(row.data.get("wait_seconds")) or 0.0
            yield Step(int(step), row.at_s - seconds + waited, row.at_s)


def _merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return stretches of time without what they share."""
    found: list[Stretch] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _overlap(stretches: Sequence[Stretch], start: float, end: float) -> float:
    """Return the time that a stretch shares with others, which are in order and apart."""
    first = bisect_right(stretches, start, key=lambda each: each[1])
    last = bisect_right(stretches, end, key=lambda each: each[0])
    return sum(min(b, end) - max(a, start) for a, b in stretches[first:last])


def module_of(param: str) -> str:
    """Return the module that a parameter's name tells of."""
    return param.rpartition(".")[0]


def block_of(layer: str) -> str:
    """Return the repeated block of a module: `layers.3.attention.wq` is in `layers.3`."""
    numbered = re.match(r"(.*?\.\d+|\d+)(?=\.|$)", layer)
    return numbered[0] if numbered else layer.partition(".")[0]


def params_of(move: Data) -> list[str]:
    """Return the names of the parameters that a collective carries, where they were recorded."""
    params = move.get("params")
    return [str(each) for each in params] if isinstance(params, (list, tuple)) else []


def moved_layer(params: Sequence[str]) -> str:
    """Return the block that all parameters lie in, or from which to which they reach."""
    blocks = list(dict.fromkeys(block_of(module_of(name) or name) for name in params))
    return " … ".join(dict.fromkeys((blocks[0], blocks[-1]))) if blocks else "not recorded"


_MOVES_SHOWN = 12


def run_time(run: MeasuredSteps) -> Node:
    """Return the parts of a mean step."""
    if not run.steps:
        return None
    s = run.parts()
    parts = [
        ("forward", s["forward"], "c3", "without waiting"),
        ("backward", s["backward"], "c4", "without waiting"),
        ("optimizer step", s["step"], "c5", "clipping, norms and what ranks agree on included"),
        ("exposed communication", s["exposed"], "c1", "the step waits for a gather or a reduction"),
        ("compiling", s["compile"], "c0", "inside these steps"),
        ("between the calls", s["between"], "c2", "the caller's own code between forward and step"),
    ]
    times = [step.end - step.start for step in run.steps]
    which = f"{count(len(run.steps), 'step')} after the last compile"
    if not run.steady:
        which = f"{count(len(run.steps), 'step')}; something was compiled in each step recorded"
    mean = (
        f"Mean of {which}: {seconds(statistics.mean(times))} per step, from "
        f"{seconds(min(times))} to {seconds(max(times))}. "
    )
    gaps = [b.start - a.end for a, b in itertools.pairwise(run.steps)]
    if gaps:
        between = seconds(statistics.mean(gaps))
        mean += f"Between two steps pass {between}: data, logging, evaluation. "
    bar = stacked(parts, "time of a step", ("part of the step", "time"))
    return section("Where the time of a step went", told(mean, link("timeline", "Timeline")), bar)


def exposed_communication(run: MeasuredSteps) -> Node:
    """Return what steps waited for, by operation and layer; times and bytes are means per step."""
    if not run.steps or not run.moves:
        return None
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for d in run.moves:
        found.setdefault((d["op"], moved_layer(params_of(d))), []).append(d)
    share = 1 / len(run.steps)
    waited = {key: share * sum(map(_waited, moves)) for key, moves in found.items()}
    ordered = sorted(found, key=lambda key: -waited[key])
    rows: list[list[Node]] = []
    for op, layer in ordered[:_MOVES_SHOWN]:
        moves, waits = found[op, layer], waited[op, layer]
        flight = share * sum(d["end_s"] - d["start_s"] for d in moves)
        rows.append(
            [
                _carried(layer, moves),
                op,
                ["span.bar-cell",
                 {"is": "Bar", "share": 100 * waits / (waited[ordered[0]] or 1)}, seconds(waits)],
                seconds(flight),
                f"{max(0.0, 100 * (1 - waits / flight)):.0f}%" if flight > 0 else "",
                f"{share * len(moves):.4g}",
                size(share * sum(d["num_bytes"] for d in moves)),
            ]
        )  # fmt: skip
    lead = (
        f"A step waits {seconds(sum(waited.values()))} for collectives. Exposed is what it waits; "
        "the rest of the time in flight is hidden behind compute."
    )
    columns = ["carries", "operation", "exposed per step", "#in flight", "#hidden", "#number"]
    rest = ordered[_MOVES_SHOWN:]
    more = f"and {len(rest)} more, {seconds(sum(waited[key] for key in rest))} exposed"
    return section(
        "Exposed communication by layer",
        told(lead),
        table([*columns, "#bytes"], rows, "moves"),
        told(more) if rest else None,
    )


def _waited(d: dict[str, Any]) -> float:
    return max(0.0, d["end_s"] - d["wait_s"])


def _carried(layer: str, moves: Iterable[dict[str, Any]]) -> Node:
    """Return a layer, which opens to the parameters of it that were moved."""
    params = list(dict.fromkeys(param for d in moves for param in params_of(d)))
    if len(params) < 2:
        return ["span.wrap", *(params or [layer])]
    named = f"{layer} ({len(params)} parameters)"
    return ["details", ["summary", named], ["p.told.wrap", "\n".join(params)]]


def own_phases(index: Index) -> Node:
    """Return what torchloom and the compiler spent on compiling: capture, planning, passes, code."""
    passes, lowered, reviews = (
        rows_of(index.session, kind, "duration_s")
        for kind in ("PassRan", "LoweredCompiled", "PlanReviewed")
    )
    if not (passes or lowered or rows_of(index.session, "CompileFinished")):
        return None
    metrics = [item.entry.metrics for item in index.entries]
    forward = [each.get("forward") or {} for each in metrics]
    backward = [each.get("backward") or {} for each in metrics]
    whole = _sum(forward, "entire_frame_compile_time_s")
    backend = _sum(forward, "backend_compile_time_s")
    late = _sum(backward, "inductor_compile_time_s")
    planning = sum(plan.planning_s for plan in index.session.plans)
    weaving = _sum(passes)
    # Passes over a lowered graph run inside its compile.
    code = max(0.0, _sum(lowered) - _sum(p for p in passes if p.get("stage") == "lowered"))
    rest = backend + late - planning - weaving - code
    parts = [
        ("capture", whole - backend, "c0", "Dynamo traces the model, guards included"),
        ("planning", planning, "c3", "torchloom tries plans on copies, and replays generated code"),
        ("measuring", _sum(reviews), "m0", "ranks time operators, for a second plan"),
        ("passes", weaving, "c2", "torchloom edits the graphs"),
        ("code generation", code, "c5", "the compiler turns the lowered graphs into code"),
        ("rest of the backend", rest, "c4", "AOTAutograd traces forward and backward; caches"),
    ]
    if not any(value > 0 for _, value, _, _ in parts):
        return None
    graphs = count(len({str(p.get("graph")) for p in passes}), "graph")
    entries = count(len(metrics), "entry", "entries")
    return section(
        "Where compile time went",
        told(f"{entries}; passes ran over {graphs}. Each entry shows the compiler's own phases."),
        stacked(parts, "compile time", ("phase", "time")),
    )


def _sum(rows: Iterable[dict[str, Any]], name: str = "duration_s") -> float:
    return sum(number(row.get(name)) or 0.0 for row in rows)
