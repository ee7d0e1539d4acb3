"""From the best candidate to the plan that is kept: its figures, and what happens to each value."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from torchloom.memory import module_of
from torchloom.plan.form import GraphForm
from torchloom.plan.frontier import FrontierPoint
from torchloom.plan.matching import op_of, places_of
from torchloom.plan.model import Decision, GraphPlan
from torchloom.plan.tried import TriedPlan


def write_plan(
    best: TriedPlan, digest: str, budget_bytes: int | None, bound_us: float
) -> GraphPlan:
    """Return the plan of a candidate, with its reasons.

    Args:
        best: the candidate with the result of its trial.
        digest: of the graph.
        budget_bytes: for forward, backward and what stays on the device; None for no bound.
        bound_us: what no plan within the budget undercuts.
    """
    made, point = best.combination, best.point
    form, kept = made.form, made.kept
    return GraphPlan(
        graph=digest,
        budget_bytes=None if budget_bytes is None else budget_bytes - kept.num_bytes,
        batch_bytes=form.problem.batch_bytes,
        peak_bytes=best.peak_bytes,
        graph_peak_bytes=best.peak_bytes,
        saved_bytes=point.saved_bytes,
        min_peak_bytes=min(best.least_bytes, form.frontier.min_peak_bytes),
        compute_us=form.compute_us,
        measured_us=form.measured_us,
        extra_us=point.extra_us,
        overhead_us=best.result.overhead_us,
        copy_us=best.result.copy_us,
        states_us=best.states_us,
        bound_us=bound_us,
        decisions=_decisions(form, point),
        again=form.offload.recompute,
        resident=dict(kept.weight_bytes),
        pieces=dict(kept.shard_bytes),
        calls_bodies=bool(form.problem.parts),
        bucket_bytes=made.transfers.bucket_bytes,
        prefetch_bytes=made.transfers.prefetch_bytes,
    )


def _decisions(form: GraphForm, point: FrontierPoint) -> tuple[Decision, ...]:
    """List what matters: values that could cross, the biggest first, unread ones behind."""
    model, places = form.model, places_of(form.problem.joint)
    offloaded = form.offload.names
    kept, again = form.handed_over(point), form.recomputed(point)
    rows = [
        _decision(each.node, each.num_bytes, "offload", each.cost_us, places)
        for each in form.offload.values
    ]
    for index in form.may_drop:
        node = model.nodes[index]
        if node.name not in offloaded:
            num_bytes = sum(model.sizes[storage] for storage in model.fresh[index])
            action = "keep" if index in kept else "recompute" if index in again else "unused"
            rows.append(_decision(node, num_bytes, action, form.cost_us[index], places))
    return tuple(sorted(rows, key=lambda row: (row.action == "unused", -row.num_bytes, row.value)))


def _decision(
    node: fx.Node,
    num_bytes: int,
    action: str,
    cost_us: float,
    places: Mapping[str, tuple[str, int]],
) -> Decision:
    return Decision(
        value=node.name,
        op=op_of(node),
        num_bytes=num_bytes,
        action=action,
        cost_us=round(cost_us, 3),
        where=module_of(node),
        place=places.get(node.name, ("", -1))[1],
    )
