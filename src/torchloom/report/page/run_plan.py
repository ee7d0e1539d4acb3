"""The plan that keeps the memory budget, and its reasons in sentences."""

from __future__ import annotations

from torchloom.records import GraphPlan, Session
from torchloom.report.page.elements import (
    Node,
    choice,
    count,
    el,
    percent,
    seconds,
    section,
    size,
    table,
)  # fmt: skip
from torchloom.report.page.figures import number
from torchloom.report.page.run_memory import newest
from torchloom.report.page.steps import told

_SHOWN = 40
_ACTIONS = {
    "keep": "kept from forward to backward",
    "recompute": "computed again in backward",
    "offload": "waits in host memory",
}


def run_plan(session: Session) -> Node:
    """Return the plan of each graph: its reasons, and what it decided of each value."""
    plans = newest(session.plans)
    if not plans:
        return None
    options = [(name, _plan(session, plan)) for name, plan in plans.items()]
    return section("The plan and its reasons", choice("Graph", options))


def _plan(session: Session, plan: GraphPlan) -> Node:
    reasons = [
        _budget(session, plan),
        _peak(plan),
        *(_action(plan, action) for action in _ACTIONS),
        *_transfers(plan),
        _time(plan),
        _compared(session),
        _bound(plan),
        _tries(plan),
    ]
    rows = [each for each in plan.decisions if each.action != "unused"]
    cells = [
        [
            ["code", each.value],
            each.where,
            size(each.num_bytes),
            [f"span.tag.{'good' if each.action == 'keep' else 'info'}",
             _ACTIONS.get(each.action, each.action)],
            _us(each.cost_us),
            _us(each.cost_us * (1 << 20) / each.num_bytes) if each.num_bytes else "",
        ]
        for each in rows[:_SHOWN]
    ]  # fmt: skip
    columns = ["value", "layer", "#bytes", "decision", "#computing it again takes"]
    more = f"and {len(rows) - _SHOWN} smaller ones in the record" if len(rows) > _SHOWN else ""
    values = el(
        "details",
        ["summary", f"{count(len(rows), 'value')} between forward and backward"],
        table([*columns, "#time per MiB freed"], cells, "decisions"),
        el("p.told", more) if more else None,
    )
    return el(
        "div",
        ["ul.reasons", *(["li", text] for text in reasons if text)],
        values if rows else None,
    )


def _us(value: float) -> str:
    return seconds(value / 1e6)


def _budget(session: Session, plan: GraphPlan) -> str:
    standing = session.standing[-1] if session.standing else None
    if plan.budget_bytes is None:
        return "No budget bounds this graph."
    if standing is None or not standing.budget_bytes:
        return f"Forward and backward may add {size(plan.budget_bytes)}."
    beside = " beside the weights that stay gathered" if plan.resident else ""
    return (
        f"The budget is {size(standing.budget_bytes)} for everything. Between steps "
        f"{size(standing.base_bytes)} live on (parameters, optimizer states), so forward and "
        f"backward may add {size(plan.budget_bytes)}{beside}."
    )


def _peak(plan: GraphPlan) -> str:
    adds = f"They add {size(plan.peak_bytes)} at the peak"
    if plan.budget_bytes is not None:
        adds += f", {percent(plan.peak_bytes, plan.budget_bytes)} of that"
    return f"{adds}. The least that any plan found needs is {size(plan.min_peak_bytes)}."


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
    stay = {True: "stays", False: "stay"}
    if plan.resident:
        num, total = len(plan.resident), size(sum(plan.resident.values()))
        found.append(
            f"{count(num, 'weight')} ({total}) {stay[num == 1]} gathered from step to step, as the "
            "budget has room: gathered once per optimizer step."
        )
    if plan.pieces:
        num, total = len(plan.pieces), size(sum(plan.pieces.values()))
        found.append(
            f"{count(num, 'shard')} ({total}) {stay[num == 1]} on the device, as the budget has room."
        )
    if plan.bucket_bytes == 0:
        found.append("Transfers are not merged: of the sizes tried, this was best.")
    elif plan.bucket_bytes:
        merged = size(plan.bucket_bytes)
        found.append(f"Transfers are merged up to {merged}, the best of the sizes tried.")
    if plan.prefetch_bytes == 0:
        found.append("No weight is gathered ahead of its use.")
    elif plan.prefetch_bytes:
        found.append(f"Weights are gathered up to {size(plan.prefetch_bytes)} ahead of their use.")
    return found


def _time(plan: GraphPlan) -> str:
    states = f", optimizer states that wait on the host {_us(plan.states_us)}"
    return (
        f"Predicted per run: compute {_us(plan.compute_us)} "
        f"({percent(plan.measured_us, plan.compute_us)} of it from operators measured on this "
        f"machine, the rest modelled), computing again {_us(plan.extra_us)}, collectives and copies "
        f"{_us(plan.overhead_us)}{states if plan.states_us else ''}."
    )


def _compared(session: Session) -> str:
    """Of a whole step, not of one graph: measured once for each plan."""
    found = told(session, "PlanCompared", "step", "measured_peak_bytes", "predicted_peak_bytes")
    if not found:
        return ""
    last = found[-1]
    predicted, measured = (
        number(last.get(f"{name}_seconds")) for name in ("predicted", "measured")
    )
    times = ""
    if measured is not None:
        guess = "no one time" if predicted is None else seconds(predicted)
        times = f"; forward and backward took {seconds(measured)}, where {guess} was predicted"
    return (
        f"Measured after step {last['step']}: a peak of {size(last['measured_peak_bytes'])}, where "
        f"{size(last['predicted_peak_bytes'])} was predicted for everything{times}."
    )


def _bound(plan: GraphPlan) -> str:
    added = plan.extra_us + plan.overhead_us + plan.states_us
    above = percent(added - plan.bound_us, plan.compute_us + plan.bound_us)
    return (
        f"No plan of this kind within the budget adds less than {_us(plan.bound_us)} to compute; "
        f"this one adds {_us(added)}, at most {above} above the best time."
    )


def _tries(plan: GraphPlan) -> str:
    if not plan.planning_s:
        return "The plan came from the compiler's cache, with the code."
    took = f"The planner took {seconds(plan.planning_s)}"
    if plan.num_tries < 2:
        return f"{took}; the code of its first plan was taken."
    return (
        f"{took} in {count(plan.num_tries, 'try', 'tries')}: the code of a plan tells what the "
        "compiler needs beyond the graphs, and the next plan counts on it. The fastest that fits "
        "was taken."
    )
