"""A record as a trace that Perfetto and chrome://tracing open: compile phases, step, collectives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
    index, rank = Index(session), session.rank
    rows = [_name(rank, 0, "process_name", f"rank {rank} of {session.world_size}")]
    for track, (name, category, bars) in enumerate(_tracks(index), 1):
        rows.append(_name(rank, track, "thread_name", name))
        rows += [_slice(rank, track, category, bar) for bar in bars]
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


def _tracks(index: Index) -> Iterator[tuple[str, str, Sequence[Bar]]]:
    """Yield name, category and bars of each track; what lies inside another bar shares its track."""
    for name, bars in run_bars(index, MeasuredSteps(index), _MOST_LANES).items():
        lanes = range(1 + max(bar["lane"] for bar in bars))
        for lane in lanes:
            title = f"{name} {lane + 1}" if len(lanes) > 1 else name
            yield title, name, [bar for bar in bars if bar["lane"] == lane]
    for item in index.entries:
        bars = compile_bars(item)
        if bars:
            yield f"compile {item.name} {item.owner.name}", "compile", bars


def _name(rank: int, track: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": track, "name": what, "args": {"name": name}}


def _slice(rank: int, track: int, category: str, bar: Bar) -> dict[str, Any]:
    start_us, end_us = bar["start"] * 1e6, bar["end"] * 1e6
    return {
        "ph": "X", "pid": rank, "tid": track, "cat": category, "name": bar["name"], "ts": start_us,
        "dur": max(0.0, end_us - start_us), "args": {"what": bar["title"]},
    }  # fmt: skip
