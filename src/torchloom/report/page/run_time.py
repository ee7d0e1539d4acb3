"""Where the time of a training step and of compiling went, and which layers a step waited for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchloom.report.page.elements import (
    Node,
    choice,
    count,
    el,
    link,
    seconds,
    section,
    size,
    stacked,
    table,
)  # fmt: skip
from torchloom.report.page.figures import number
from torchloom.report.page.index import Index
from torchloom.report.page.steps import MeasuredSteps, carried, gap, moved_layer, params_of, told

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
    num = count(len(run.steps), "step")
    which = f"{num} after the last compile" if run.steady else (
        f"{num}; something was compiled in each step recorded"
    )  # fmt: skip
    between = gap(run.steps)
    told_of = (
        f"Mean of {which}: {seconds(statistics.mean(times))} per step, from "
        f"{seconds(min(times))} to {seconds(max(times))}. "
    )
    if between is not None:
        told_of += f"Between two steps pass {seconds(between)}: data, logging, evaluation. "
    lead = ["p.told", told_of, link("timeline", "Timeline")]
    bar = stacked(parts, "time of a step", ("part of the step", "time"))
    return section("Where the time of a step went", lead, bar)


@dataclass(kw_only=True)
class _Moves:
    """What is known of collectives of one sort: means per step."""

    op: str
    name: str
    params: dict[str, None] = field(default_factory=dict)
    num: float = 0
    num_bytes: float = 0
    flight: float = 0
    waited: float = 0


def exposed_communication(run: MeasuredSteps) -> Node:
    """Return what steps waited for, by layer or by the parameters that travel together."""
    if not run.steps or not run.moves:
        return None
    by_params, by_layer = _grouped(run, carried, True), _grouped(run, moved_layer, False)
    waited = sum(each.waited for each in by_params)
    lead = (
        f"A step waits {seconds(waited)} for {count(len(by_params), 'set')} of parameters that "
        "travel together. Exposed is what it waits; the rest of the time in flight is hidden "
        "behind compute."
    )
    options = [("layer", _move_table(by_layer)), ("parameters", _move_table(by_params))]
    pick = choice("Rows by", options, 0 if len(by_params) > _MOVES_SHOWN else 1)
    return section("Exposed communication by layer", ["p.told", lead], pick)


def _grouped(
    run: MeasuredSteps, name_of: Callable[[Sequence[str]], str], is_by_params: bool
) -> list[_Moves]:
    found: dict[tuple[str, ...], _Moves] = {}
    share = 1 / len(run.steps)
    for d in run.moves:
        params, op = params_of(d), str(d.get("op"))
        name = name_of(params)
        key = (op, *params) if is_by_params else (op, name)
        row = found.setdefault(key, _Moves(op=op, name=name))
        row.params.update(dict.fromkeys(params))
        row.num += share
        row.num_bytes += d["num_bytes"] * share
        row.flight += (d["end_s"] - d["start_s"]) * share
        row.waited += max(0.0, d["end_s"] - d["wait_s"]) * share
    return sorted(found.values(), key=lambda row: -row.waited)


def _move_table(rows: Sequence[_Moves]) -> Node:
    most = rows[0].waited or 1
    cells = [
        [
            _move_name(row),
            row.op,
            ["span.bar-cell", {"is": "Bar", "share": 100 * row.waited / most}, seconds(row.waited)],
            seconds(row.flight),
            f"{max(0.0, 100 * (1 - row.waited / row.flight)):.0f}%" if row.flight > 0 else "",
            f"{row.num:.{0 if row.num == round(row.num) else 1}f}",
            size(row.num_bytes),
        ]
        for row in rows[:_MOVES_SHOWN]
    ]
    columns = ["carries", "operation", "exposed per step", "#in flight", "#hidden", "#number"]
    rest = rows[_MOVES_SHOWN:]
    more = f"and {len(rest)} more, {seconds(sum(row.waited for row in rest))} exposed"
    shown = table([*columns, "#bytes"], cells, "moves")
    return ["", shown, *([["p.told", more]] if rest else [])]


def _move_name(row: _Moves) -> Node:
    if len(row.params) < 2:
        return ["span.wrap", row.name]
    return ["details", ["summary", row.name], ["p.told.wrap", "\n".join(row.params)]]


def own_phases(index: Index) -> Node:
    """Return what torchloom and the compiler spent on compiling: capture, planning, passes, code."""
    passes = told(index.session, "PassRan", "duration_s")
    lowered = told(index.session, "LoweredCompiled", "duration_s")
    if not (passes or lowered or told(index.session, "CompileFinished")):
        return None
    metrics = [item.entry.metrics for item in index.entries]
    forward = [each.get("forward") or {} for each in metrics]
    backward = [each.get("backward") or {} for each in metrics]
    whole, backend = (
        _sum(forward, "entire_frame_compile_time_s"),
        _sum(forward, "backend_compile_time_s"),
    )
    late = _sum(backward, "inductor_compile_time_s")
    planning = sum(plan.planning_s for plan in index.session.plans)
    weaving = _sum(passes, "duration_s")
    # Passes over a lowered graph run inside its compile.
    inside = _sum([p for p in passes if p.get("stage") == "lowered"], "duration_s")
    code = max(0.0, _sum(lowered, "duration_s") - inside)
    rest = max(0.0, backend + late - planning - weaving - code)
    measuring = _sum(told(index.session, "PlanReviewed"), "duration_s")
    parts = [
        ("capture", max(0.0, whole - backend), "c0", "Dynamo traces the model, guards included"),
        ("planning", planning, "c3", "torchloom tries plans on copies, and replays generated code"),
        ("measuring", measuring, "m0", "ranks time operators, for a second plan"),
        ("passes", weaving, "c2", "torchloom edits the graphs"),
        ("code generation", code, "c5", "the compiler turns the lowered graphs into code"),
        ("rest of the backend", rest, "c4", "AOTAutograd traces forward and backward; caches"),
    ]
    if not any(value > 0 for _, value, _, _ in parts):
        return None
    graphs = len({str(p.get("graph")) for p in passes})
    lead = (
        f"{count(len(metrics), 'entry', 'entries')}; passes ran over {count(graphs, 'graph')}. "
        "Each entry shows the compiler's own phases."
    )
    bar = stacked(parts, "compile time", ("phase", "time"))
    return section("Where compile time went", el("p.told", lead), bar)


def _sum(rows: Sequence[dict[str, Any]], name: str) -> float:
    return sum(number(row.get(name)) or 0.0 for row in rows)
