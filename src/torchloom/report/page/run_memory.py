"""Where the memory went: the predicted peak against the budget, by kind and by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchloom.records import Alive, GraphPlan, Peak, Session, Standing
from torchloom.report.page.elements import (
    Node,
    choice,
    el,
    percent,
    section,
    size,
    stacked,
    table,
)  # fmt: skip
from torchloom.report.page.steps import block_of, module_of

_COLOURS = {
    "parameters": "c0", "master copies": "m0", "optimizer states": "c5", "buffers": "m1",
    "gradients": "c1", "gathered weights": "c2", "activations": "c3", "communication": "c4",
    "workspace": "m2",
}  # fmt: skip
_NOTES = {
    "parameters": "this rank's shards, and what is whole on every rank",
    "master copies": "what the optimizer steps in place of the parameters",
    "optimizer states": "live on from step to step",
    "gradients": "of weights and of activations",
    "gathered weights": "whole weights on this rank, and casts of them",
    "activations": "what forward computed and backward still reads",
    "communication": "what the transport holds between start and wait",
    "workspace": "of the operator that runs at the peak",
    "batch": "inputs of the step",
    "generated code beyond its graphs": "buffers that the compiler adds or does not reuse",
    "buffers": "of the model's modules",
    "reserve": "for losses, norms and scales, and what another rank holds more",
}
_LAYERS_SHOWN = 14


def newest(rows: Sequence[Any]) -> dict[str, Any]:
    """Return of each graph what was found last; the newest graph last."""
    found: dict[str, Any] = {}
    for row in rows:
        found.pop(row.graph, None)
        found[row.graph] = row
    return found


def run_memory(session: Session) -> Node:
    """Return what is alive at the predicted peak, of each graph."""
    plans, peaks = newest(session.plans), newest(session.peaks)
    standing = session.standing[-1] if session.standing else None
    graphs = list(dict.fromkeys([*plans, *peaks]))
    if not graphs and standing is None:
        return None
    views = [
        (name, _view(_Memory(peaks.get(name), plans.get(name), standing)))
        for name in graphs or [""]
    ]
    views[-1] = (f"{views[-1][0]} (newest)", views[-1][1])
    return section("Where the memory went", choice("Graph", views))


@dataclass
class _Memory:
    """What is alive at the peak of one graph's step."""

    peak: Peak | None
    plan: GraphPlan | None
    standing: Standing | None

    def __post_init__(self) -> None:
        plan, peak, standing = self.plan, self.peak, self.standing
        self.groups = list(standing.parts) if standing else []
        base, step = (standing.base_bytes, standing.step_bytes) if standing else (0, 0)
        self._add("reserve", base - sum(each.num_bytes for each in self.groups))
        within, code = peak.peak_bytes if peak else 0, 0
        if plan:
            for name, num_bytes in plan.resident.items():
                self._add("gathered weights", num_bytes, module_of(name))
            for name, num_bytes in plan.pieces.items():
                self._add("parameters", num_bytes, module_of(name))
            within = plan.batch_bytes + plan.peak_bytes
            code = plan.peak_bytes - peak.peak_bytes if peak else 0
        self.is_update = step > within
        if self.is_update:
            code = 0
            self._add("optimizer's step", step)
        else:
            self._add("batch", plan.batch_bytes if plan else 0)
            self.groups += peak.alive if peak else []
        self._add("generated code beyond its graphs", code)
        self.saved_by_code = max(0, -code)
        self.total = sum(each.num_bytes for each in self.groups) - self.saved_by_code
        self.budget = standing.budget_bytes if standing else None

    def _add(self, kind: str, num_bytes: int, layer: str = "") -> None:
        if num_bytes > 0:
            self.groups.append(Alive(kind=kind, layer=layer, num_bytes=num_bytes))


def _view(m: _Memory) -> Node:
    if not (m.peak or m.standing):
        return ["p.empty", "Nothing was recorded of this graph's memory."]
    limit = (m.budget, f"budget: {size(m.budget)}") if m.budget else None
    parts = [
        (kind, value, _COLOURS.get(kind, "m3"), _NOTES.get(kind, ""))
        for kind, value in _sums(m.groups, lambda each: each.kind)
    ]
    less = (
        "The parts are those of the graph. The code that the compiler wrote fuses operators and "
        f"reuses buffers: it needs {size(m.saved_by_code)} less, which the total counts."
    )
    return el(
        "div",
        ["p", *_head(m)],
        ["p.told", *_when(m)],
        stacked(parts, "memory at the peak", ("alive at the peak", "bytes"), limit, is_bytes=True),
        ["p.told", less] if m.saved_by_code else None,
        _layers([each for each in m.groups if each.layer]),
    )


def _head(m: _Memory) -> list[Node]:
    head: list[Node] = ["Predicted peak of this rank: ", ["strong", size(m.total)]]
    if not m.budget:
        return [*head, ". No memory budget was given."]
    share = f" allows ({percent(m.total, m.budget)})."
    return [*head, f" of {size(m.budget)} that ", ["code", "compile.memory_budget"], share]


def _when(m: _Memory) -> list[Node]:
    if m.is_update:
        return ["The peak is in the optimizer's step, not in forward or backward."]
    if m.peak is None:
        return [
            "What is alive in forward and backward was not recorded: their code came from a cache."
        ]
    at = f" of {m.peak.layer}" if m.peak.layer else ""
    lacks = "" if m.plan else (
        " Nothing was planned: the workspace of operators and what the transport holds are not counted."
    )  # fmt: skip
    return [f"The peak is in {m.peak.phase}, while ", ["code", m.peak.node], f"{at} runs.{lacks}"]


def _sums(rows: Sequence[Alive], key_of: Callable[[Alive], str]) -> list[tuple[str, int]]:
    sums: Counter[str] = Counter()
    for row in rows:
        sums[key_of(row)] += row.num_bytes
    return sums.most_common()


def _layers(named: list[Alive]) -> Node:
    """Return a table with blocks of the model down and kinds across, the biggest first."""
    if not named:
        return None
    kinds = [kind for kind, _ in _sums(named, lambda each: each.kind)]
    blocks = [block for block, _ in _sums(named, lambda each: block_of(each.layer))]

    def cells(name: Node, shown: Sequence[str]) -> list[Node]:
        own = Counter[str]()
        for each in named:
            if block_of(each.layer) in shown:
                own[each.kind] += each.num_bytes
        return [name, *(size(own[k]) if own[k] else "" for k in kinds), size(own.total())]

    rows = [cells(["code", block], [block]) for block in blocks[:_LAYERS_SHOWN]]
    hidden = blocks[_LAYERS_SHOWN:]
    if hidden:
        rows.append(cells(f"{len(hidden)} others", hidden))
    columns = ["layer", *(f"#{kind}" for kind in kinds), "#together"]
    return ["div", ["h3", "By layer"], table(columns, rows, "layers")]
