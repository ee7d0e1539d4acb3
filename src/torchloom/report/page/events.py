"""torchloom's own events in words, each with when it came: from the start of its step."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

from torchloom.records import EventRow
from torchloom.report.page.elements import count, rounded, seconds, size
from torchloom.report.page.steps import MeasuredSteps, begin_of, carried, params_of

_MAX_VALUE = 300
Data = Mapping[str, Any]


def event_rows(events: list[EventRow], run: MeasuredSteps) -> list[tuple[str, str, str]]:
    """Return when each event began, its name and what it tells."""
    starts = [step.start for step in run.all]
    first = min(map(begin_of, events), default=0.0)

    def when(row: EventRow) -> str:
        at = begin_of(row)
        own = bisect_right(starts, at) - 1
        if own < 0:
            return seconds(at - first)  # before all steps: from the start of the record
        return f"step {run.all[own].step} + {seconds(at - starts[own])}"

    return [(when(row), _WORDS.get(row.kind, (row.kind,))[0], _text(row)) for row in events]


def _text(row: EventRow) -> str:
    """Return what happened; of an event that is not known here, or is damaged, its fields."""
    try:
        return _WORDS[row.kind][1](row.data)
    except (KeyError, TypeError, ValueError, AttributeError):
        told = {key: value for key, value in row.data.items() if value is not None}
        shown = {key: json.dumps(value, default=str)[:_MAX_VALUE] for key, value in told.items()}
        return ", ".join(f"{key} {value}" for key, value in shown.items())


def what_moves(d: Data) -> str:
    """Return what a collective carries."""
    return carried(params_of(d)) if params_of(d) else count(d["num_tensors"], "tensor")


def move_text(d: Data) -> str:
    """Return a collective in words."""
    waited = seconds(max(0.0, d["end_s"] - d["wait_s"]))
    return (
        f"{d['op']} of {what_moves(d)}, {size(d['num_bytes'])}: "
        f"{seconds(d['end_s'] - d['start_s'])}, of which waited {waited}"
    )


def _joined(*texts: str) -> str:
    return ", ".join(text for text in texts if text)


def _chosen(d: Data) -> str:
    return "; ".join(
        [d["backend"], *(f"{name} failed: {why}" for name, why in d.get("failed") or [])]
    )


def _compared(d: Data) -> str:
    peak = f"peak {size(d['measured_peak_bytes'])}, predicted {size(d['predicted_peak_bytes'])}"
    if d.get("measured_seconds") is None:
        return peak
    return f"{peak}; forward and backward {seconds(d['measured_seconds'])}"


def _skipped(d: Data) -> str:
    first = f", first {d['value']} in {d['param']} on rank {d['rank']}" if d.get("param") else ""
    return f"step {d['step']}: gradients not finite{first}"


def _step(d: Data) -> str:
    tokens = d.get("tokens_per_second")
    return _joined(
        f"step {d['step']} in {seconds(d['seconds'])}",
        "" if d.get("loss") is None else f"loss {rounded(d['loss'])}",
        "" if tokens is None else f"{rounded(tokens)} tokens/s",
        count(d["recompiles"], "recompile") if d.get("recompiles") else "",
        "skipped" if d.get("skipped") else "",
    )


_WORDS: dict[str, tuple[str, Callable[[Data], str]]] = {
    "PassRan": (
        "pass",
        lambda d: (
            f"{d['name']} on {d['graph']} ({d['stage']}): {count(d['num_edits'], 'edit')} in "
            f"{seconds(d['duration_s'])}"
        ),
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
        lambda d: _joined(
            f"{d['graph']} in {seconds(d['duration_s'])}",
            "from a cache" if d.get("from_cache") else "",
        ),
    ),
    "LoweredCompiled": (
        "code",
        lambda d: f"{d['lowered']} of {d['graph']} in {seconds(d['duration_s'])}",
    ),
    "PlanReviewed": (
        "plan reviewed",
        lambda d: (
            f"operators measured for {seconds(d['duration_s'])}; the plan "
            f"{'changes' if d.get('changes') else 'stays'}"
        ),
    ),
    "BackendChosen": ("backend", _chosen),
    "CollectiveRan": ("collective", move_text),
    "PhaseRan": (
        "phase",
        lambda d: (
            f"{'optimizer' if d['phase'] == 'step' else d['phase']} of step {d['step'] + 1}: "
            f"{seconds(d['duration_s'])}"
        ),
    ),
    "StepSkipped": ("step skipped", _skipped),
    "StepEnded": ("step", _step),
    "PlanCompared": ("plan compared", _compared),
}
"""Per kind: its name, and what one event tells."""
