"""Two runs beside each other: the page that `torchloom diff --html` writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchloom.records import Session
from torchloom.records.diff import diff
from torchloom.report.page.elements import (
    Node,
    empty,
    rounded,
    seconds,
    section,
    size,
    table,
)  # fmt: skip
from torchloom.report.page.figures import run_figures
from torchloom.report.page.headline import curves
from torchloom.report.page.index import Index

_MAX_VALUE = 200
_SHOWN: dict[str, Callable[[Any], str]] = {
    "step time": seconds,
    "tokens/s": rounded,
    "model FLOP utilization": lambda value: f"{100 * value:.1f}%",
    "last loss": rounded,
    "last held-out loss": rounded,
    "peak memory, measured": size,
    "peak memory, predicted": size,
    "memory budget": size,
    "memory of the process or allocator": size,
    "forward and backward, predicted": seconds,
    "forward and backward, measured": seconds,
    "ranks": str,
    "compile time": seconds,
    "entries": str,
    "recompiles": str,
    "graph breaks": str,
}
"""What stands in the table, in order, and how its values are told."""
_FACTS = ("model", "num_params", "world_size", "device", "zero_stage")
"""What `summary.json` of a run says beside its figures."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """One side of a comparison."""

    name: str
    session: Session
    folder: Path | None = None
    """Of the run; its metrics, its `config.json` and its `summary.json` are read."""


def comparison(before: ComparedRun, after: ComparedRun) -> Node:
    """Return what two runs show side by side."""
    runs = [_figures(each) for each in (before, after)]
    rows = [_row(name, show, *(each.get(name) for each in runs)) for name, show in _SHOWN.items()]
    config = _changed(_config(before.folder), _config(after.folder))
    found = diff(before.session, after.session)
    topics = [(name, getattr(found, name)) for name in found.__slots__]
    told = [["", ["h3", name], ["pre.text", "\n".join(lines)]] for name, lines in topics if lines]
    sides = [(side.name, run_figures(side.session, side.folder)) for side in (before, after)]
    names = [side.name for side in (before, after)]
    none = empty("Nothing that both runs recorded: torchloom train writes config.json.")
    equal = empty("Nothing: functions, guards, graphs and kernels are equal.")
    shown = [row for row in rows if row is not None]
    return [
        "",
        section(
            "Figures", table(["figure", *(f"#{n}" for n in names), "#ratio"], shown, "compared")
        ),
        curves([(name, run) for name, run in sides if run is not None]),
        section(
            "What differs in the configuration",
            table(["key", *names], config) if config else none,
        ),
        section("What differs in what was compiled", *(told or [equal])),
    ]


def _figures(side: ComparedRun) -> dict[str, float | None]:
    """Return the figures of a side by their names; None where one was not recorded."""
    session, run = side.session, run_figures(side.session, side.folder)
    index = Index(session)
    found: dict[str, float | None] = {
        "compile time": sum(entry.compile_s for entry in index.entries),
        "entries": len(index.entries),
        "recompiles": session.num_recompiles,
        "graph breaks": len(session.breaks()),
    }
    if run is None:
        return found
    return found | {
        "step time": run.step_s.median if run.step_s else None,
        "tokens/s": run.tokens_per_s,
        "model FLOP utilization": run.mfu,
        "last loss": _last(run.curves.get("loss")),
        "last held-out loss": _last(run.heldout.get("loss")),
        "peak memory, measured": run.measured_bytes,
        "peak memory, predicted": run.predicted_bytes,
        "memory budget": run.budget_bytes,
        "memory of the process or allocator": run.memory_bytes,
        "forward and backward, predicted": run.predicted_s,
        "forward and backward, measured": run.measured_s,
        "ranks": run.world_size,
    }


def _last(values: Sequence[float | None] | None) -> float | None:
    return next((value for value in reversed(values or ()) if value is not None), None)


def _row(
    name: str, show: Callable[[Any], str], old: float | None, new: float | None
) -> list[Node] | None:
    """Return a row of the table; ratios are told of amounts, not of counts."""
    if old is None and new is None:
        return None
    is_amount = show is not str and old and new is not None
    ratio = f"{new / old:.2f}x" if is_amount and old and new is not None else ""
    return [name, *("not recorded" if v is None else show(v) for v in (old, new)), ratio]


def _config(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    facts = _read(folder / "summary.json")
    try:
        keys = dict(_flat(_read(folder / "config.json")))
    except RecursionError:  # no configuration is as deep
        keys = {}
    told = {n: facts[n] for n in _FACTS if isinstance(facts.get(n), (str, int, float))}
    return {**{name: str(value)[:_MAX_VALUE] for name, value in told.items()}, **keys}


def _read(path: Path) -> Mapping[str, Any]:
    """Return a JSON object of a file, nothing where there is none."""
    try:
        data = json.loads(path.read_text("utf-8", "replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested objects by their dotted keys, as text."""
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, json.dumps(value)[:_MAX_VALUE]


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[list[Node]]:
    names = dict.fromkeys([*old, *new]) if old and new else {}
    return [[n, old.get(n, ""), new.get(n, "")] for n in names if old.get(n) != new.get(n)]
