"""Training steps, found in the phases that a run recorded, and where the time of one went."""

from __future__ import annotations

import itertools
import re
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchloom.records import EventRow, Session
from torchloom.report.page.figures import number
from torchloom.report.page.index import Index

Data = Mapping[str, Any]
Stretch = tuple[float, float]
_PHASE = ("step", "start_s", "duration_s")
_MOVE = ("start_s", "wait_s", "end_s", "num_bytes", "num_tensors")


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the optimizer with its micro-steps; seconds on the clock of events."""

    step: int
    start: float
    end: float


class MeasuredSteps:
    """The steps after the last compile, where there are any; else all steps."""

    def __init__(self, index: Index) -> None:
        session = index.session
        phases, moves = told(session, "PhaseRan", *_PHASE), told(session, "CollectiveRan", *_MOVE)
        self.all_phases = [d for d in phases if isinstance(d.get("phase"), str)]
        self.all_moves = [d for d in moves if isinstance(d.get("op"), str)]
        self.all = training_steps(self.all_phases)
        end = _last_compile_end(index)
        self.steady = [step for step in self.all if step.start >= end]
        self.steps = self.steady or self.all
        self.phases = [d for d in self.all_phases if self._holds(d["start_s"])]
        self.moves = [d for d in self.all_moves if self._holds(d["wait_s"])]
        self.compiles = merged(
            (span.start_us / 1e6, (span.start_us + span.duration_us) / 1e6)
            for item in index.entries
            for span in item.entry.spans
        )

    def _holds(self, at: float) -> bool:
        i = bisect_right(self.steps, at, key=lambda step: step.start) - 1
        return i >= 0 and at <= self.steps[i].end

    def parts(self) -> dict[str, float]:
        """Return mean seconds per step of each part; they add up to the step."""
        waits = merged((d["wait_s"], d["end_s"]) for d in self.moves)
        sums = dict.fromkeys(("forward", "backward", "step", "exposed", "compile"), 0.0)
        sums["between"] = sum(step.end - step.start for step in self.steps)
        for d in self.phases:
            start, long = d["start_s"], d["duration_s"]
            compiling = _overlap(self.compiles, start, start + long)
            exposed = min(_overlap(waits, start, start + long), long - compiling)
            sums["compile"] += compiling
            sums["exposed"] += exposed
            sums[d["phase"]] = sums.get(d["phase"], 0.0) + long - compiling - exposed
            sums["between"] -= long
        return {name: max(0.0, total / (len(self.steps) or 1)) for name, total in sums.items()}

    def exposed_share(self) -> float | None:
        """Return the share of a step that waits for collectives."""
        parts = self.parts()
        whole = sum(parts.values())
        return parts["exposed"] / whole if self.steps and whole else None


def told(session: Session, kind: str, *numbers: str) -> list[dict[str, Any]]:
    """Return what events of a kind tell, of those that have these numbers."""
    rows = [row.data for row in session.events if row.kind == kind]
    return [d for d in rows if all(number(d.get(name)) is not None for name in numbers)]


def begin_of(row: EventRow) -> float:
    """Return when an event began; those without a begin tell when they ended."""
    begin = number(row.data.get("start_s"))
    return row.at_s if begin is None else begin


def training_steps(phases: Sequence[Data]) -> list[Step]:
    """Return the steps in order."""
    ordered = in_order(phases)
    found: list[Step] = []
    for i, d in enumerate(ordered):
        after = ordered[i + 1] if i + 1 < len(ordered) else {}
        is_inner = after.get("phase") == "step" and after.get("step") == d["step"]
        first = _first_of_step(ordered, i)
        if d.get("phase") != "step" or is_inner or first == i:
            continue
        name = int(d["step"]) + 1  # phases tell the steps done before; metrics count from 1
        if found and found[-1].step == name:
            found.pop()  # an inner micro-step: this one goes further
        found.append(Step(name, ordered[first]["start_s"], d["start_s"] + d["duration_s"]))
    return found


def in_order(phases: Sequence[Data]) -> list[Data]:
    """Return phases by their begin."""
    return sorted(phases, key=lambda d: d["start_s"])


def is_evaluation(ordered: Sequence[Data], i: int) -> bool:
    """Return whether a phase is a forward that no backward follows."""
    after = ordered[i + 1].get("phase") if i + 1 < len(ordered) else "forward"
    return ordered[i].get("phase") == after == "forward"


def _first_of_step(ordered: Sequence[Data], last: int) -> int:
    """Two forwards in a row are an evaluation before the step: none of its backward is there."""
    first = last
    for i in range(last - 1, -1, -1):
        if ordered[i]["step"] != ordered[last]["step"] or is_evaluation(ordered, i):
            break
        first = i
    return first


def _last_compile_end(index: Index) -> float:
    spans = [span for item in index.entries for span in item.entry.spans]
    ends = [(span.start_us + span.duration_us) / 1e6 for span in spans]
    ends += [row.at_s for row in index.session.events if row.kind == "CompileFinished"]
    return max(ends, default=float("-inf"))


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
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


def gap(steps: Sequence[Step]) -> float | None:
    """Return the mean time between steps."""
    gaps = [b.start - a.end for a, b in itertools.pairwise(steps)]
    return statistics.mean(gaps) if gaps else None


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
    if not params:
        return "not recorded"
    blocks = list(dict.fromkeys(block_of(module_of(name) or name) for name in params))
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"


def carried(params: Sequence[str]) -> str:
    """Return in few words what a collective carries: one layer, or from where to where."""
    if len(params) < 2:
        return params[0] if params else "not recorded"
    layers = list(dict.fromkeys(map(module_of, params)))
    where = (layers[0] or "model") if len(layers) == 1 else moved_layer(params)
    return f"{where} ({len(params)} parameters)"
