"""The figures of a training run that the page shows first: steps, memory, predictions, ranks.

They come from the record's events and, where the run left a folder, from its `metrics.jsonl` and the records of
other ranks. Both may be anybody's files: only finite numbers are taken from them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchloom.errors import RecordError
from torchloom.files import read_json_lines
from torchloom.records import Session, load_record

_MAX_POINTS = 1500
"""Steps drawn in a curve; of longer runs, evenly spaced ones."""
_PROCESSORS = frozenset({"x86_64", "AMD64", "aarch64", "arm64"})
"""What `Session.device` says without an accelerator: memory is then that of the process."""
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The median of some values, and the range of their middle half."""

    median: float
    low: float
    high: float
    num: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
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
    ranks: list[RankFigures] = field(default_factory=list)


def run_figures(session: Session, folder: str | Path | None = None) -> RunFigures | None:
    """Return the figures of a run, None for a record that has no training step.

    Args:
        session: the record of one rank.
        folder: of the run; its metrics and the records of other ranks are read.
    """
    ended = _told(session, "StepEnded")
    rows = [] if folder is None else read_json_lines(Path(folder) / "metrics.jsonl")
    steps = _steps(rows, ended)
    if not (steps or session.standing or _told(session, "PhaseRan")):
        return None
    compiled = _compiling_steps(ended)
    steady = [row for row in steps if row["step"] not in compiled] or steps
    newest = _newest(session)
    peaks = [newest.get("peak_bytes"), *(row["peak_bytes"] for row in steps)]
    standing = session.standing[-1] if session.standing else None
    return RunFigures(
        world_size=session.world_size,
        curves=_thinned(steps),
        heldout=_thinned(_evals(rows)),
        num_compiled=len(steps) - len(steady),
        step_s=_spread(row["seconds"] for row in steady),
        tokens_per_s=_median(row["tokens_per_s"] for row in steady),
        mfu=_median(row["mfu"] for row in steady),
        budget_bytes=None if standing is None else standing.budget_bytes,
        predicted_bytes=newest.get("predicted_peak_bytes", _predicted_bytes(session)),
        measured_bytes=newest.get("measured_peak_bytes"),
        memory_bytes=max((peak for peak in peaks if peak is not None), default=None),
        is_process_memory=session.device in _PROCESSORS,
        predicted_s=newest.get("predicted_seconds"),
        measured_s=newest.get("measured_seconds"),
        ranks=_ranks(session, folder),
    )


def _steps(
    rows: Sequence[Mapping[str, Any]], ended: Sequence[Mapping[str, Any]]
) -> list[dict[str, float | None]]:
    """Return the steps of the metrics file, or else those of the record."""
    steps = [_of_metrics(row) for row in rows if row.get("kind") == "step"]
    steps = steps or [_of_event(row) for row in ended]
    return [row for row in steps if row["step"] is not None]


def _evals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float | None]]:
    return [
        {"step": number(row.get("step")), "loss": number(row.get("heldout_loss"))}
        for row in rows
        if row.get("kind") == "eval"
    ]


def _newest(session: Session) -> dict[str, float]:
    """Return the last number that steps and comparisons with the plan told under each name."""
    found: dict[str, float] = {}
    for row in [*_told(session, "StepEnded"), *_told(session, "PlanCompared")]:
        numbers = {str(name): number(value) for name, value in row.items()}
        found.update({name: value for name, value in numbers.items() if value is not None})
    return found


def _of_metrics(row: Mapping[str, Any]) -> dict[str, float | None]:
    memory, peak = number(row.get("memory_gib")), number(row.get("peak_memory_gib"))
    return {
        "step": number(row.get("step")),
        "seconds": number(row.get("step_time_s")),
        "loss": number(row.get("loss")),
        "tokens_per_s": number(row.get("tokens_per_s")),
        "mfu": number(row.get("mfu")),
        "memory_bytes": None if memory is None else memory * _GIB,
        "peak_bytes": None if peak is None else peak * _GIB,
    }


def _of_event(row: Mapping[str, Any]) -> dict[str, float | None]:
    names = {"tokens_per_s": "tokens_per_second", "memory_bytes": "peak_bytes"}
    wanted = ("step", "seconds", "loss", "tokens_per_s", "mfu", "memory_bytes", "peak_bytes")
    return {name: number(row.get(names.get(name, name))) for name in wanted}


def _compiling_steps(ended: Sequence[Mapping[str, Any]]) -> set[float | None]:
    """Return the steps in which a graph was captured."""
    found, graphs = set(), 0.0
    for row in ended:
        now = number(row.get("graphs")) or 0.0
        if now > graphs:
            found.add(number(row.get("step")))
        graphs = max(graphs, now)
    return found


def _predicted_bytes(session: Session) -> int | None:
    """Return the predicted peak of the newest graph with what stands beside it."""
    if not session.standing:
        return None
    standing = session.standing[-1]
    beside, within = 0, session.peaks[-1].peak_bytes if session.peaks else 0
    if session.plans:
        plan = session.plans[-1]
        beside = sum(plan.resident.values()) + sum(plan.pieces.values())
        within = plan.batch_bytes + plan.peak_bytes
    return standing.base_bytes + beside + max(standing.step_bytes, within)


def _ranks(session: Session, folder: str | Path | None) -> list[RankFigures]:
    sessions = {session.rank: session}
    others = [] if folder is None else sorted(Path(folder).glob("record-rank*.json"))
    for path in others:
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
    moves = _told(session, "CollectiveRan")
    ends = [(number(move.get("wait_s")), number(move.get("end_s"))) for move in moves]
    waits = [
        sum(
            max(0.0, end - wait)
            for wait, end in ends
            if wait is not None and end is not None and at_s - seconds < end <= at_s
        )
        for at_s, seconds in times
    ]
    works = [seconds - wait for (_, seconds), wait in zip(times, waits, strict=True)]
    return RankFigures(
        rank=session.rank,
        step_s=spread,
        waits_s=statistics.median(waits),
        works_s=statistics.median(works),
    )


def _told(session: Session, kind: str) -> list[dict[str, Any]]:
    return [row.data for row in session.events if row.kind == kind]


def _thinned(rows: Sequence[Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    """Return rows as columns, without those that no screen has room for; the last one stays."""
    every = max(1, math.ceil(len(rows) / _MAX_POINTS))
    kept = [row for i, row in enumerate(reversed(rows)) if i % every == 0][::-1]
    return {name: [row[name] for row in kept] for name in (kept[0] if kept else ())}


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    low, high = known[len(known) // 4], known[(3 * len(known) - 1) // 4]
    return Spread(median=statistics.median(known), low=low, high=high, num=len(known))


def _median(values: Iterable[float | None]) -> float | None:
    spread = _spread(values)
    return None if spread is None else spread.median


def number(value: Any) -> float | None:
    """Return a finite number as it is, None for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < 2.0**63 else None
