"""A record as a trace that Perfetto and chrome://tracing open: compile phases, step, collectives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchloom.files import write_whole
from torchloom.records import Session
from torchloom.report.page.index import Index
from torchloom.report.page.steps import MeasuredSteps
from torchloom.report.page.timeline import Bar, compile_bars, run_bars

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
