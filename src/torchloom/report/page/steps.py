"""Training steps, as a run recorded their ends, and where the time of one went."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torchloom.records import EventRow, Session
from torchloom.report.page.elements import number
from torchloom.report.page.index import Index

Data = Mapping[str, Any]
Stretch = tuple[float, float]
_PHASE = ("step", "start_s", "duration_s")
_MOVE = ("start_s", "wait_s", "end_s", "num_bytes", "num_tensors")


class Step(NamedTuple):
    """A step of the optimizer with its micro-steps; seconds on the clock of events."""

    step: int
    start: float
    end: float


class MeasuredSteps:
    """The steps after the last compile, where there are any; else all steps."""

    def __init__(self, index: Index) -> None:
        session = index.session
        phases, moves = (
            rows_of(session, "PhaseRan", *_PHASE),
            rows_of(session, "CollectiveRan", *_MOVE),
        )
        self.all_phases = in_order([d for d in phases if isinstance(d.get("phase"), str)])
        self.all_moves = in_order([d for d in moves if isinstance(d.get("op"), str)])
        self.all = sorted(_steps(session), key=lambda step: step.start)
        begins: dict[Step, float] = {}
        for d in self.all_phases:  # a step begins with its first phase, to the microsecond
            if step := self.at(d["start_s"] + d["duration_s"] / 2):
                begins.setdefault(step, d["start_s"])
        self.all = [step._replace(start=begins.get(step, step.start)) for step in self.all]
        spans = [span for item in index.entries for span in item.entry.spans]
        compiles = [(s.start_us / 1e6, (s.start_us + s.duration_us) / 1e6) for s in spans]
        ends = [end for _, end in compiles]
        ends += [row.at_s for row in session.events if row.kind == "CompileFinished"]
        last = max(ends, default=float("-inf"))
        self.steady = [step for step in self.all if step.start >= last]
        self.steps = self.steady or self.all
        kept = {*self.steps}
        self.phases = [d for d in self.all_phases if self.at(d["start_s"]) in kept]
        self.moves = [d for d in self.all_moves if self.at(d["wait_s"]) in kept]
        self._compiles = _merged(compiles)

    def at(self, seconds: float) -> Step | None:
        """Return the step that a time lies in."""
        i = bisect_right(self.all, seconds, key=lambda step: step.start) - 1
        return self.all[i] if i >= 0 and seconds <= self.all[i].end else None

    def parts(self) -> dict[str, float]:
        """Return mean seconds per step of each part; they add up to the step."""
        waits = _merged((d["wait_s"], d["end_s"]) for d in self.moves)
        sums = dict.fromkeys(("forward", "backward", "step", "exposed", "compile"), 0.0)
        sums["between"] = sum(step.end - step.start for step in self.steps)
        for d in self.phases:
            start, long = d["start_s"], d["duration_s"]
            compiling = _overlap(self._compiles, start, start + long)
            exposed = min(_overlap(waits, start, start + long), long - compiling)
            sums["compile"] += compiling
            sums["exposed"] += exposed
            sums[d["phase"]] = sums.get(d["phase"], 0.0) + long - compiling - exposed
            sums["between"] -= long
        return {name: max(0.0, total / (len(self.steps) or 1)) for name, total in sums.items()}


def rows_of(session: Session, kind: str, *numbers: str) -> list[dict[str, Any]]:
    """Return what events of a kind tell, of those that have these numbers."""
    rows = [row.data for row in session.events if row.kind == kind]
    return [d for d in rows if all(number(d.get(name)) is not None for name in numbers)]


def begin_of(row: EventRow) -> float:
    """Return when an event began; those without a begin tell when they ended."""
    begin = number(row.data.get("start_s"))
    return row.at_s if begin is None else begin


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return phases or collectives by their begin."""
    return sorted(rows, key=lambda d: d["start_s"])


def _steps(session: Session) -> Iterable[Step]:
    """Yield the steps from the begin of their first forward on."""
    for row in session.events:
        step, seconds = number(row.data.get("step")), number(row.data.get("seconds"))
        if row.kind == "StepEnded" and step is not None and seconds is not None:
            waited = number(row.data.get("wait_seconds")) or 0.0
            yield Step(int(step), row.at_s - seconds + waited, row.at_s)


def _merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return stretches of time without what they share."""
    found: list[Stretch] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _overlap(stretches: Sequence[Stretch], start: float, end: float) -> float:
    """Return the time that a stretch shares with others, which are in order and apart."""
    first = bisect_right(stretches, start, key=lambda each: each[1])
    last = bisect_right(stretches, end, key=lambda each: each[0])
    return sum(min(b, end) - max(a, start) for a, b in stretches[first:last])


def module_of(param: str) -> str:
    """Return the module that a parameter's name tells of."""
    return param.rpartition(".")[0]


def block_of(layer: str) -> str:
    """Return the repeated block of a module: `layers.3.attention.wq` is in `layers.3`."""
    numbered = re.match(r"(.*?\.\d+|\d+)(?=\.|$)", layer)
    return numbered[0] if numbered else layer.partition(".")[0]


def params_of(move: Data) -> list[str]:
    """Return the names of the parameters that a collective carries, where they were recorded."""
    params = move.get("params")
    return [str(each) for each in params] if isinstance(params, (list, tuple)) else []


def moved_layer(params: Sequence[str]) -> str:
    """Return the block that all parameters lie in, or from which to which they reach."""
    blocks = list(dict.fromkeys(block_of(module_of(name) or name) for name in params))
    return " … ".join(dict.fromkeys((blocks[0], blocks[-1]))) if blocks else "not recorded"
