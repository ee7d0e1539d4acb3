"""A record on one screen of text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchloom.records.entry import Break, Entry
from torchloom.records.model import Function, Session

_MAX_FUNCTIONS = 12
_MAX_BREAKS = 5
_MAX_RECOMPILES = 5


def summary(session: Session) -> str:
    """Return a record as text: functions, entries, breaks, recompiles, times, and what to do."""
    functions = [f for f in session.all_functions() if f.entries or f.skipped or f.breaks]
    entries = list(session.entries())
    breaks = session.breaks()
    caches = [use for entry in entries for use in entry.caches]
    hits = sum(use.outcome == "hit" for use in caches)
    lines = [
        f"{count(len(functions), 'function')}, {count(len(entries), 'entry', 'entries')}, "
        f"{count(len(breaks), 'graph break')}, {count(session.num_recompiles, 'recompile')}; "
        f"compiling took {sum(entry.compile_s for entry in entries):.1f} s, "
        f"{hits} of {len(caches)} cache lookups hit"
    ]
    lines += [_over_limit(each) for each in functions if each.num_eager_calls]
    if session.num_unknown_eager_calls:
        lines.append(
            f"  {count(session.num_unknown_eager_calls, 'call')} of functions that could not be told "
            "ran eagerly: no entry fitted, and nothing is compiled any more"
        )
    lines += [_program(row.data) for row in session.events if row.kind == "ProgramReady"]
    lines += [_compared(row.data) for row in session.events if row.kind == "PlanCompared"]
    for function in session.functions[:_MAX_FUNCTIONS]:
        lines += _function(function, 0)
    if len(session.functions) > _MAX_FUNCTIONS:
        lines.append(f"... and {len(session.functions) - _MAX_FUNCTIONS} more functions")
    for each in breaks[:_MAX_BREAKS]:
        lines += _break(each)
    if len(breaks) > _MAX_BREAKS:
        lines.append(f"... and {len(breaks) - _MAX_BREAKS} more graph breaks")
    shown = 0
    for function in functions:
        for entry in function.entries:
            if entry.recompiles and shown < _MAX_RECOMPILES:
                shown += 1
                lines += _recompile(function, entry)
    return "\n".join(lines)


def _over_limit(function: Function) -> str:
    where = f"{function.name} ({_short(function.file)}:{function.line})"
    if function.recompile_limit is None:
        return f"  NOT COMPILED ANY MORE: {where}: {function.skipped}"
    return f"  RECOMPILE LIMIT: {where}: {function.skipped}"


def _program(data: Mapping[str, Any]) -> str:
    boxes = data["boxes"]
    shown = "; ".join(boxes[:3]) + (f"; and {len(boxes) - 3} more" if len(boxes) > 3 else "")
    return (
        f"  {data['model']}: {count(len(boxes), 'program')} {data['origin']} in {data['seconds']:.1f} s "
        f"({shown}), {count(data['num_graphs'], 'graph')}, "
        f"{count(len(data['verdicts']), 'assumption')} about sizes that hold"
    )


def _compared(data: Mapping[str, Any]) -> str:
    predicted_s, measured_s = data["predicted_seconds"], data["measured_seconds"]
    times = "" if measured_s is None else f", forward and backward {1e3 * measured_s:.1f} ms"
    if times and predicted_s is not None:
        times += f" ({1e3 * predicted_s:.1f} ms predicted)"
    return (
        f"  the plan after step {data['step']}: peak {data['measured_peak_bytes'] / 2**20:.1f} MiB "
        f"({data['predicted_peak_bytes'] / 2**20:.1f} MiB predicted){times}"
    )


def _function(function: Function, depth: int) -> list[str]:
    indent = "  " * (depth + 1)
    lines = [f"{indent}{function.name} ({_short(function.file)}:{function.line})"]
    if function.skipped:
        lines.append(f"{indent}  runs eagerly: {function.skipped}")
    for entry in function.entries:
        calls = count(entry.num_hits, "call") if entry.is_counted else "calls not counted"
        state = "" if entry.status == "live" else f", {entry.status}"
        lines.append(
            f"{indent}  entry {entry.compile_id}: {len(entry.guards)} guards, "
            f"{count(len(entry.kernels), 'kernel')}, {calls}, "
            f"{entry.compile_s:.1f} s{state}"
        )
    for child in function.children:
        lines += _function(child, depth + 1)
    return lines


def _break(each: Break) -> list[str]:
    lines = [f"graph break at {_short(each.place)}: {each.reason} [{each.gb_type}]"]
    if each.explanation:
        lines.append(f"  {each.explanation}")
    if each.hints:
        lines.append(f"  fix: {each.hints[0]}")
    return lines


def _recompile(function: Function, entry: Entry) -> list[str]:
    lines = []
    for each in entry.recompiles:
        where = f" at {each.source}" if each.source else ""
        lines.append(
            f"recompile {entry.compile_id} of {function.name}: {each.entry} was rejected{where}"
        )
        lines.append(
            f"  expected {each.expected}" + (f", got {each.actual}" if each.actual else "")
        )
        if each.fix:
            lines.append(f"  fix: {each.fix}")
    return lines


def count(number: int, word: str, many: str | None = None) -> str:
    """Return a number with its word."""
    return f"{number} {word if number == 1 else many or word + 's'}"


def _short(place: str) -> str:
    """Return a path from the working folder, where it lies below it."""
    path, in_word, rest = place.partition(" in ")
    short = os.path.relpath(path) if Path(path).is_absolute() else path
    return f"{path if short.startswith('..') else short}{in_word}{rest}"
