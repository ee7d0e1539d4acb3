"""Where the time of a training step and of compiling went, and which layers a step waited for."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from typing import Any

from torchloom.report.page.elements import (
    Node,
    count,
    link,
    number,
    seconds,
    section,
    size,
    stacked,
    table,
    told,
)  # fmt: skip
from torchloom.report.page.index import Index
from torchloom.report.page.steps import MeasuredSteps, moved_layer, params_of, rows_of

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
