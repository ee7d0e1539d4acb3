"""Two runs beside each other: the data of the page that `torchloom diff --html` writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchloom.records import Session
from torchloom.records.diff import diff
from torchloom.report.page.figures import run_figures

_MAX_VALUE = 200
_FACTS = ("model", "num_params", "world_size", "device", "zero_stage")
"""What `summary.json` of a run says beside its figures."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """One side of a comparison."""

    name: str
    session: Session
    folder: Path | None = None
    """Of the run; its metrics, its `config.json` and its `summary.json` are read."""


def comparison(before: ComparedRun, after: ComparedRun) -> dict[str, Any]:
    """Return what two runs show side by side, as plain data."""
    found = diff(before.session, after.session)
    topics = {name: getattr(found, name) for name in found.__slots__}
    return {
        "runs": [_side(each) for each in (before, after)],
        "config": _changed(_config(before.folder), _config(after.folder)),
        "topics": [[name, lines] for name, lines in topics.items() if lines],
    }


def _side(side: ComparedRun) -> dict[str, Any]:
    session, run = side.session, run_figures(side.session, side.folder)
    return {
        "name": side.name,
        "run": None if run is None else dataclasses.asdict(run),
        "compile_s": sum(entry.compile_s for entry in session.entries()),
        "entries": sum(1 for _ in session.entries()),
        "recompiles": session.num_recompiles,
        "breaks": len(session.breaks()),
    }


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


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = dict.fromkeys([*old, *new]) if old and new else {}
    return [(n, old.get(n, ""), new.get(n, "")) for n in names if old.get(n) != new.get(n)]
