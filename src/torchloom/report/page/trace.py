"""A record as a trace that Perfetto and chrome://tracing open: compile phases, step, collectives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchloom.files import write_whole
from torchloom.records import Entry, EventRow, Function, Session

_PHASES = 1
_COLLECTIVES = 2
_FIRST_ENTRY = 100
"""Track numbers. Overlapping collectives take the numbers from `_COLLECTIVES` up to `_FIRST_ENTRY`."""


def to_trace(session: Session) -> dict[str, Any]:
    """Return the trace in the Trace Event Format: times in microseconds, the rank as process.

    Compile spans get a track per entry, training phases one, collectives as many as overlap.
    """
    rank = session.rank
    rows = [_name(rank, None, f"rank {rank} of {session.world_size}")]
    rows += _phases(session)
    rows += _collectives(session)
    track = _FIRST_ENTRY
    for function in session.all_functions():
        for entry in function.entries:
            rows += _entry(rank, track, function, entry)
            track += 1
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


def _entry(rank: int, track: int, function: Function, entry: Entry) -> Iterator[dict[str, Any]]:
    if not entry.spans:
        return
    epoch = f" after reset {entry.epoch}" if entry.epoch else ""
    yield _name(rank, track, f"compile {entry.compile_id}{epoch} {function.name}")
    for span in entry.spans:
        yield _slice(rank, track, "compile", span.name, span.start_us, span.duration_us)


def _phases(session: Session) -> Iterator[dict[str, Any]]:
    rows = [row for row in session.events if row.kind == "PhaseRan"]
    if rows:
        yield _name(session.rank, _PHASES, "training step")
    for row in rows:
        start, duration = _us(row, "start_s"), _us(row, "duration_s")
        name = str(row.data.get("phase", "phase"))
        args = {"step": row.data.get("step")}
        yield _slice(session.rank, _PHASES, "phase", name, start, duration, args)


def _collectives(session: Session) -> Iterator[dict[str, Any]]:
    """Yield each collective with its waiting inside it, on the first track that is free."""
    rows = [row for row in session.events if row.kind == "CollectiveRan"]
    free_from: list[float] = []
    for row in sorted(rows, key=lambda row: _us(row, "start_s")):
        start, wait, end = (_us(row, key) for key in ("start_s", "wait_s", "end_s"))
        lane = next((i for i, free in enumerate(free_from) if free <= start), len(free_from))
        if lane == len(free_from):
            if _COLLECTIVES + lane + 1 >= _FIRST_ENTRY:
                continue  # a hundred collectives at once: not a timeline that can be read
            free_from.append(end)
            yield _name(session.rank, _COLLECTIVES + lane, f"collectives {lane + 1}")
        free_from[lane] = end
        track = _COLLECTIVES + lane
        args = {key: row.data.get(key) for key in ("num_bytes", "num_tensors", "params")}
        op = str(row.data.get("op", "collective"))
        yield _slice(session.rank, track, "collective", op, start, end - start, args)
        if end > wait:
            yield _slice(session.rank, track, "wait", f"wait for {op}", wait, end - wait)


def _us(row: EventRow, key: str) -> float:
    return float(row.data.get(key) or 0.0) * 1e6


def _name(rank: int, track: int | None, name: str) -> dict[str, Any]:
    what = "process_name" if track is None else "thread_name"
    return {"ph": "M", "pid": rank, "tid": track or 0, "name": what, "args": {"name": name}}


def _slice(
    rank: int,
    track: int,
    category: str,
    name: str,
    start_us: float,
    duration_us: float,
    args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    times = {"ts": start_us, "dur": max(0.0, duration_us)}
    return {
        "ph": "X", "pid": rank, "tid": track, "cat": category, "name": name, **times,
        "args": args or {},
    }  # fmt: skip
