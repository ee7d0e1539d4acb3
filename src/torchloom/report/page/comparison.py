"""Two runs beside each other: the page that `torchloom diff --html` writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from torchloom.records import Session
from torchloom.records.diff import diff
from torchloom.report.page.elements import Node, rounded, seconds, section, size, table
from torchloom.report.page.figures import RunFigures, known, run_figures
from torchloom.report.page.headline import curves
from torchloom.report.page.index import Index

_MAX_VALUE = 200
_FACTS = ("model", "num_params", "world_size", "device", "zero_stage")
"""What `summary.json` of a run says beside its figures."""


class ComparedRun(NamedTuple):
    """One side of a comparison."""

    name: str
    session: Session
    folder: Path | None = None
    """Of the run; its metrics, its `config.json` and its `summary.json` are read."""


Shown = tuple[str, Callable[[Any], str], Callable[[Any], float | None]]
"""The name of a figure, how its value is told, and where it comes from."""
_OF_RUN: list[Shown] = [
    ("step time", seconds, lambda run: run.step_s.median if run.step_s else None),
    ("tokens/s", rounded, attrgetter("tokens_per_s")),
    ("model FLOP utilization", lambda value: f"{100 * value:.1f}%", attrgetter("mfu")),
    ("last loss", rounded, lambda run: _last(run.curves.get("loss"))),
    ("last held-out loss", rounded, lambda run: _last(run.heldout.get("loss"))),
    ("peak memory, measured", size, attrgetter("measured_bytes")),
    ("peak memory, predicted", size, attrgetter("predicted_bytes")),
    ("memory budget", size, attrgetter("budget_bytes")),
    ("memory of the process or allocator", size, attrgetter("memory_bytes")),
    ("forward and backward, predicted", seconds, attrgetter("predicted_s")),
    ("forward and backward, measured", seconds, attrgetter("measured_s")),
    ("ranks", str, attrgetter("world_size")),
]
_OF_RECORD: list[Shown] = [
    ("compile time", seconds, lambda index: sum(entry.compile_s for entry in index.entries)),
    ("entries", str, lambda index: len(index.entries)),
    ("recompiles", str, lambda index: index.session.num_recompiles),
    ("graph breaks", str, lambda index: len(index.session.breaks())),
]


def comparison(before: ComparedRun, after: ComparedRun) -> Node:
    """Return what two runs show side by side."""
    sides = [before, after]
    runs = [run_figures(side.session, side.folder) for side in sides]
    rows = [*_rows(_OF_RUN, runs), *_rows(_OF_RECORD, [Index(side.session) for side in sides])]
    named: list[tuple[str, RunFigures]] = [
        (side.name, run) for side, run in zip(sides, runs, strict=True) if run is not None
    ]
    names = [side.name for side in sides]
    config = _changed(_config(before.folder), _config(after.folder))
    found = diff(before.session, after.session)
    topics = [(name, getattr(found, name)) for name in found.__slots__]
    return [
        "",
        section(
            "Figures", table(["figure", *(f"#{n}" for n in names), "#ratio"], rows, "compared")
        ),
        curves(named),
        section(
            "What differs in the configuration",
            table(["key", *names], config),
            none="Nothing that both runs recorded: torchloom train writes config.json.",
        ),
        section(
            "What differs in what was compiled",
            *(["", ["h3", n], ["pre.text", "\n".join(lines)]] for n, lines in topics if lines),
            none="Nothing: functions, guards, graphs and kernels are equal.",
        ),
    ]


def _rows(figures: Sequence[Shown], sides: Sequence[Any]) -> Iterator[list[Node]]:
    """Yield the rows of a table; ratios are told of amounts, not of counts."""
    for name, show, value_of in figures:
        old, new = (None if side is None else value_of(side) for side in sides)
        if old is not None or new is not None:
            ratio = f"{new / old:.2f}x" if show is not str and old and new is not None else ""
            yield [name, *("not recorded" if v is None else show(v) for v in (old, new)), ratio]


def _last(values: Sequence[float | None] | None) -> float | None:
    found = known(values or ())
    return found[-1] if found else None


def _config(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    facts = _read(folder / "summary.json")
    try:
        keys = dict(_flat(_read(folder / "config.json")))
    except RecursionError:  # no configuration is as deep
        keys = {}
    told = {n: str(facts[n]) for n in _FACTS if isinstance(facts.get(n), (str, int, float))}
    return {name: value[:_MAX_VALUE] for name, value in {**told, **keys}.items()}


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
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value)


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[list[Node]]:
    names = dict.fromkeys([*old, *new]) if old and new else {}
    return [[n, old.get(n, ""), new.get(n, "")] for n in names if old.get(n) != new.get(n)]
