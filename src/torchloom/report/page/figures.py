"""The figures of a training run that the page shows first: steps, memory, predictions, ranks.

They come from the record's events and, where the run left a folder, from its `metrics.jsonl` and the records of
other ranks. Both may be anybody's files: only finite numbers are taken from them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchloom.errors import RecordError
from torchloom.files import read_json_lines
from torchloom.records import Session, load_record
from torchloom.report.page.elements import number
from torchloom.report.page.memory import peaks_of
from torchloom.report.page.run_time import rows_of

_MAX_POINTS = 1500
"""Steps drawn in a curve; of longer runs, evenly spaced ones."""
_PROCESSORS = frozenset({"x86_64", "AMD64", "aarch64", "arm64"})
"""What `Session.device` says without an accelerator: memory is then that of the process."""
_GIB = 1 << 30
_COLUMNS = {
    "step": ("step", "step", 1),
    "seconds": ("step_time_s", "seconds", 1),
    "loss": ("loss", "loss", 1),
    "tokens_per_s": ("tokens_per_s", "tokens_per_second", 1),
    "mfu": ("mfu", "mfu", 1),
    "memory_bytes": ("memory_gib", "peak_bytes", _GIB),
    "peak_bytes": ("peak_memory_gib", "peak_bytes", _GIB),
}
"""A step's numbers: names in the metrics file and in the event, and the unit of the file."""
Row = dict[str, float | None]


class Spread(NamedTuple):
    """The median of some values, and the range of their middle half."""

    median: float
    low: float
    high: float
    num: int


class RankFigures(NamedTuple):
    """Seconds per step of one rank."""

    rank: int
    step_s: Spread
    waits_s: float
    """Median time per step that it waits for collectives."""
    works_s: float
    """Median of the rest: the slowest rank works longest, and the others wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """The figures of a run; None where one was not recorded."""

    world_size: int
    curves: dict[str, list[float | None]]
    """By name, one value per step: step, seconds, loss, tokens_per_s, memory_bytes."""
    heldout: dict[str, list[float | None]]
    """step and loss of each evaluation."""
    num_compiled: int
    """Steps in which something was compiled; the medians leave them out."""
    step_s: Spread | None
    tokens_per_s: float | None
    mfu: float | None
    budget_bytes: int | None
    predicted_bytes: float | None
    measured_bytes: float | None
    """The peak that is comparable to the prediction: tensors, standing memory included."""
    memory_bytes: float | None
    """The peak by torch's allocator; on a CPU, of the process."""
    is_process_memory: bool
    predicted_s: float | None
    """Time of forward and backward by the plan."""
    measured_s: float | None
    ranks: list[RankFigures]


def run_figures(session: Session, folder: str | Path | None = None) -> RunFigures | None:
    """Return the figures of a run, None for a record that has no training step.

    Args:
        session: the record of one rank.
        folder: of the run; its metrics and the records of other ranks are read.
    """
    ended = rows_of(session, "StepEnded")
    rows = [] if folder is None else read_json_lines(Path(folder) / "metrics.jsonl")
    steps = [
        {name: _scaled(row.get(of), unit) for name, (of, _, unit) in _COLUMNS.items()}
        for row in rows
        if row.get("kind") == "step"
    ]
    steps = steps or [
        {name: number(row.get(of)) for name, (_, of, _) in _COLUMNS.items()} for row in ended
    ]
    steps = [row for row in steps if row["step"] is not None]
    if not (steps or session.standing or rows_of(session, "PhaseRan")):
        return None
    evals: list[Row] = [
        {"step": number(row.get("step")), "loss": number(row.get("heldout_loss"))}
        for row in rows
        if row.get("kind") == "eval"
    ]
    compiled = _compiling_steps(ended)
    steady = [row for row in steps if row["step"] not in compiled] or steps
    newest = _newest([*ended, *rows_of(session, "PlanCompared")])
    foretold = [each.total for each in peaks_of(session).values()] if session.standing else []
    peaks = known([newest.get("peak_bytes"), *(row["peak_bytes"] for row in steps)])
    return RunFigures(
        world_size=session.world_size,
        curves=_thinned(steps),
        heldout=_thinned(evals),
        num_compiled=len(steps) - len(steady),
        step_s=_spread(row["seconds"] for row in steady),
        tokens_per_s=_median(row["tokens_per_s"] for row in steady),
        mfu=_median(row["mfu"] for row in steady),
        budget_bytes=session.standing[-1].budget_bytes if session.standing else None,
        predicted_bytes=newest.get("predicted_peak_bytes", foretold[-1] if foretold else None),
        measured_bytes=newest.get("measured_peak_bytes"),
        memory_bytes=max(peaks, default=None),
        is_process_memory=session.device in _PROCESSORS,
        predicted_s=newest.get("predicted_seconds"),
        measured_s=newest.get("measured_seconds"),
        ranks=_ranks(session, folder),
    )


def _scaled(value: Any, unit: int) -> float | None:
    found = number(value)
    return None if found is None else found * unit


def _newest(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the last number that rows tell under each name."""
    numbers = ((name, number(value)) for row in rows for name, value in row.items())
    return {name: value for name, value in numbers if value is not None}


def _compiling_steps(ended: Sequence[Mapping[str, Any]]) -> set[float | None]:
    """Return the steps in which a graph was captured."""
    found, graphs = set(), 0.0
    for row in ended:
        now = number(row.get("graphs")) or 0.0
        if now > graphs:
            found.add(number(row.get("step")))
        graphs = max(graphs, now)
    return found


def _ranks(session: Session, folder: str | Path | None) -> list[RankFigures]:
    sessions = {session.rank: session}
    for path in [] if folder is None else sorted(Path(folder).glob("record-rank*.json")):
        try:
            other = load_record(path)
        except RecordError:
            continue
        if other.world_size == session.world_size:
            sessions.setdefault(other.rank, other)
    found = [_rank(each) for _, each in sorted(sessions.items())]
    return [each for each in found if each is not None]


def _rank(session: Session) -> RankFigures | None:
    """Return how long the steps of a rank took, and how long it waited in them."""
    rows = [row for row in session.events if row.kind == "StepEnded"]
    compiled = _compiling_steps([row.data for row in rows])
    rows = [row for row in rows if number(row.data.get("step")) not in compiled] or rows
    times = [(row.at_s, number(row.data.get("seconds")) or 0.0) for row in rows]
    spread = _spread(seconds for _, seconds in times)
    if spread is None:
        return None
    moves = rows_of(session, "CollectiveRan", "wait_s", "end_s")
    waits = [
        sum(max(0.0, d["end_s"] - d["wait_s"]) for d in moves if at_s - long < d["end_s"] <= at_s)
        for at_s, long in times
    ]
    works = [long - wait for (_, long), wait in zip(times, waits, strict=True)]
    return RankFigures(session.rank, spread, statistics.median(waits), statistics.median(works))


def _thinned(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Return rows as columns, without those that no screen has room for; the last one stays."""
    every = max(1, math.ceil(len(rows) / _MAX_POINTS))
    kept = rows[::-1][::every][::-1]
    return {name: [row[name] for row in kept] for name in (kept[0] if kept else ())}


def known(values: Iterable[float | None]) -> list[float]:
    """Return the values that were recorded."""
    return [value for value in values if value is not None]


def _spread(values: Iterable[float | None]) -> Spread | None:
    found = sorted(known(values))
    if not found:
        return None
    low, high = found[len(found) // 4], found[(3 * len(found) - 1) // 4]
    return Spread(statistics.median(found), low, high, len(found))


def _median(values: Iterable[float | None]) -> float | None:
    spread = _spread(values)
    return None if spread is None else spread.median
