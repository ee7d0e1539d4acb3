"""Where the memory went: the predicted peak against the budget, by kind and by layer, and the plan with its reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torchloom.records import Alive, GraphPlan, Peak, Session, Standing
from torchloom.records.summary import count
from torchloom.report.page.elements import (
    Node,
    choice,
    el,
    percent,
    seconds,
    section,
    size,
    stacked,
    table,
    told,
)  # fmt: skip
from torchloom.report.page.run_time import block_of, module_of

_KINDS = {
    "parameters": ("c0", "this rank's shards, and what is whole on every rank"),
    "master copies": ("m0", "what the optimizer steps in place of the parameters"),
    "optimizer states": ("c5", "live on from step to step"),
    "buffers": ("m1", "of the model's modules"),
    "gradients": ("c1", "of weights and of activations"),
    "gathered weights": ("c2", "whole weights on this rank, and casts of them"),
    "activations": ("c3", "what forward computed and backward still reads"),
    "communication": ("c4", "what the transport holds between start and wait"),
    "workspace": ("m2", "of the operator that runs at the peak"),
    "batch": ("m3", "inputs of the step"),
    "generated code beyond its graphs": (
        "m3",
        "buffers that the compiler adds or does not reuse",
    ),
    "reserve": ("m3", "for losses, norms and scales, and what another rank holds more"),
}
"""Colour of what is alive, and what it is."""
_LAYERS_SHOWN = 14
_DECISIONS_SHOWN = 40
_ACTIONS = {
    "keep": "kept from forward to backward",
    "recompute": "computed again in backward",
    "offload": "waits in host memory",
}


class PeakMemory:
    """What is alive at the predicted peak of one graph's step.

    Args:
        peak: of what forward and backward allocate.
        plan: of the graph, where there is a budget.
        standing: what stays between steps.
    """

    def __init__(
        self, peak: Peak | None, plan: GraphPlan | None, standing: Standing | None
    ) -> None:
        self.peak, self.plan = peak, plan
        self.budget = standing.budget_bytes if standing else None
        self.groups = list(standing.parts) if standing else []
        base, step = (standing.base_bytes, standing.step_bytes) if standing else (0, 0)
        self._add("reserve", base - sum(each.num_bytes for each in self.groups))
        within = code = 0
        if peak:
            within = peak.peak_bytes
        if plan:
            for name, num_bytes in plan.resident.items():
                self._add("gathered weights", num_bytes, module_of(name))
            for name, num_bytes in plan.pieces.items():
                self._add("parameters", num_bytes, module_of(name))
            code = plan.peak_bytes - within if peak else 0
            within = plan.batch_bytes + plan.peak_bytes
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

    def _add(self, kind: str, num_bytes: int, layer: str = "") -> None:
        if num_bytes > 0:
            self.groups.append(Alive(kind=kind, layer=layer, num_bytes=num_bytes))


def peaks_of(session: Session) -> dict[str, PeakMemory]:
    """Return what is alive at the peak of each graph by its name, the newest graph last."""
    plans, peaks = _newest(session.plans), _newest(session.peaks)
    standing = session.standing[-1] if session.standing else None
    graphs = list(dict.fromkeys([*plans, *peaks])) or ([""] if standing else [])
    return {name: PeakMemory(peaks.get(name), plans.get(name), standing) for name in graphs}


def run_memory(session: Session) -> Node:
    """Return what is alive at the predicted peak, of each graph."""
    views = [(name, _view(each, session)) for name, each in peaks_of(session).items()]
    if not views:
        return None
    views[-1] = (f"{views[-1][0]} (newest)", views[-1][1])
    return section("Where the memory went", choice("Graph", views))


def run_plan(session: Session) -> Node:
    """Return the plan of each graph: its reasons, and what it decided of each value."""
    options = [(name, _plan(session, plan)) for name, plan in _newest(session.plans).items()]
    return section("The plan and its reasons", choice("Graph", options)) if options else None


def _newest(rows: Sequence[Any]) -> dict[str, Any]:
    """Return of each graph what was found last; the newest graph last."""
    found: dict[str, Any] = {}
    for row in rows:
        found.pop(row.graph, None)
        found[row.graph] = row
    return found


def _view(m: PeakMemory, session: Session) -> Node:
    if not (m.peak or session.standing):
        return ["p.empty", "Nothing was recorded of this graph's memory."]
    limit = (m.budget, f"budget: {size(m.budget)}") if m.budget else None
    parts = [
        (kind, value, *_KINDS.get(kind, ("m3", "")))
        for kind, value in _sums(m.groups, lambda each: each.kind)
    ]
    allows: list[Node] = [". No memory budget was given."]
    if m.budget:
        share = f" allows ({percent(m.total, m.budget)})."
        allows = [f" of {size(m.budget)} that ", ["code", "compile.memory_budget"], share]
    less = (
        "The parts are those of the graph. The code that the compiler wrote fuses operators and "
        f"reuses buffers: it needs {size(m.saved_by_code)} less, which the total counts."
    )
    return el(
        "div",
        ["p", "Predicted peak of this rank: ", ["strong", size(m.total)], *allows],
        told(_when(m)),
        stacked(parts, "memory at the peak", ("alive at the peak", "bytes"), limit, is_bytes=True),
        told(less) if m.saved_by_code else None,
        _layers([each for each in m.groups if each.layer]),
    )


def _when(m: PeakMemory) -> str:
    if m.is_update:
        return "The peak is in the optimizer's step, not in forward or backward."
    if m.peak is None:
        return (
            "What is alive in forward and backward was not recorded: their code came from a cache."
        )
    at = f" of {m.peak.layer}" if m.peak.layer else ""
    lacks = "" if m.plan else (
        " Nothing was planned: the workspace of operators and what the transport holds are not counted."
    )  # fmt: skip
    return f"The peak is in {m.peak.phase}, while {m.peak.node}{at} runs.{lacks}"


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
        own = dict(_sums([a for a in named if block_of(a.layer) in shown], lambda a: a.kind))
        return [name, *(size(own[k]) if k in own else "" for k in kinds), size(sum(own.values()))]

    rows = [cells(["code", block], [block]) for block in blocks[:_LAYERS_SHOWN]]
    if hidden := blocks[_LAYERS_SHOWN:]:
        rows.append(cells(f"{len(hidden)} others", hidden))
    columns = ["layer", *(f"#{kind}" for kind in kinds), "#together"]
    return ["div", ["h3", "By layer"], table(columns, rows, "layers")]


def _plan(session: Session, plan: GraphPlan) -> Node:
    reasons = [
        _budget(session, plan),
        *(_action(plan, action) for action in _ACTIONS),
        *_transfers(plan),
        *_time(plan),
    ]
    decided = [each for each in plan.decisions if each.action != "unused"]
    rows = [
        [["code", each.value], each.where, size(each.num_bytes),
         [f"span.tag.{'good' if each.action == 'keep' else 'info'}",
          _ACTIONS.get(each.action, each.action)],
         _us(each.cost_us),
         _us(each.cost_us * (1 << 20) / each.num_bytes) if each.num_bytes else ""]
        for each in decided[:_DECISIONS_SHOWN]
    ]  # fmt: skip
    columns = ["value", "layer", "#bytes", "decision", "#computing it again takes"]
    more = len(decided) - _DECISIONS_SHOWN
    values = el(
        "details",
        ["summary", f"{count(len(decided), 'value')} between forward and backward"],
        table([*columns, "#time per MiB freed"], rows, "decisions"),
        told(f"and {more} smaller ones in the record") if more > 0 else None,
    )
    shown = ["ul.reasons", *(["li", text] for text in reasons if text)]
    return el("div", shown, values if rows else None)


def _us(value: float) -> str:
    return seconds(value / 1e6)


def _budget(session: Session, plan: GraphPlan) -> str:
    standing = session.standing[-1] if session.standing else None
    least = f"The least that any plan found needs is {size(plan.min_peak_bytes)}."
    adds = f"They add {size(plan.peak_bytes)} at the peak"
    if plan.budget_bytes is None:
        return f"No budget bounds this graph. {adds}. {least}"
    beside = " beside the weights that stay gathered" if plan.resident else ""
    may = f"orward and backward may add {size(plan.budget_bytes)}{beside}."
    share = f"{adds}, {percent(plan.peak_bytes, plan.budget_bytes)} of that. {least}"
    if standing is None or not standing.budget_bytes:
        return f"F{may} {share}"
    return (
        f"The budget is {size(standing.budget_bytes)} for everything. Between steps "
        f"{size(standing.base_bytes)} live on (parameters, optimizer states), so f{may} {share}"
    )


def _action(plan: GraphPlan, action: str) -> str:
    own = [each.num_bytes for each in plan.decisions if each.action == action]
    if not own:
        return ""
    what = f"{count(len(own), 'value')} ({size(sum(own))})"
    if action == "keep":
        return f"Forward keeps {what} for backward."
    if action == "offload":
        copies = f"copies add {_us(plan.copy_us)}"
        return f"{what} wait in host memory between forward and backward; {copies}."
    cost = "which takes no time that counts: cheap values that its kernels need anyway"
    if plan.extra_us > 0:
        share = percent(plan.extra_us, plan.compute_us)
        cost = f"to save their memory; this takes {_us(plan.extra_us)}, {share} of compute"
    return f"Backward computes {what} again, {cost}."


def _transfers(plan: GraphPlan) -> list[str]:
    found = []
    for what, where, held in (
        ("weight", "gathered from step to step", plan.resident),
        ("shard", "on the device", plan.pieces),
    ):
        if held:
            stay = "stays" if len(held) == 1 else "stay"
            total = size(sum(held.values()))
            found.append(
                f"{count(len(held), what)} ({total}) {stay} {where}, as the budget has room."
            )
    if plan.bucket_bytes is not None:
        merged = f"merged up to {size(plan.bucket_bytes)}" if plan.bucket_bytes else "not merged"
        found.append(f"Transfers are {merged}, the best of the sizes tried.")
    if plan.prefetch_bytes is not None:
        ahead = f"up to {size(plan.prefetch_bytes)}" if plan.prefetch_bytes else "nothing"
        found.append(f"Of the weights, {ahead} is gathered ahead of its use.")
    return found


def _time(plan: GraphPlan) -> list[str]:
    states = f", optimizer states that wait on the host {_us(plan.states_us)}"
    added = plan.extra_us + plan.overhead_us + plan.states_us
    above = percent(added - plan.bound_us, plan.compute_us + plan.bound_us)
    planned = "The plan came from the compiler's cache, with the code."
    if plan.planning_s:
        tries = count(plan.num_tries, "try", "tries")
        planned = f"The planner took {seconds(plan.planning_s)}; the fastest that fits of {tries} was taken."
    return [
        f"Predicted per run: compute {_us(plan.compute_us)} "
        f"({percent(plan.measured_us, plan.compute_us)} of it from operators measured on this "
        f"machine, the rest modelled), computing again {_us(plan.extra_us)}, collectives and copies "
        f"{_us(plan.overhead_us)}{states if plan.states_us else ''}.",
        f"No plan of this kind within the budget adds less than {_us(plan.bound_us)} to compute; "
        f"this one adds {_us(added)}, at most {above} above the best time.",
        planned,
    ]
