"""A candidate that was tried, and the plan that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from torchloom.memory import module_of
from torchloom.plan.field import Field
from torchloom.plan.frontier import Point
from torchloom.plan.model import Decision, GraphPlan
from torchloom.plan.places import op_of, places_of
from torchloom.plan.task import Beside, Flight, Outcome, Task

NOTICEABLE = 1e-3
"""Part of a graph's time that is worth another plan; less is rounding."""


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate that was tried."""

    field: Field
    at: int
    """Its place on the frontier."""
    outcome: Outcome
    allowed: int | None
    """What its peak may be."""
    beside: Beside
    flight: Flight
    least: int
    """The lowest peak that any candidate was found to have."""
    states_us: float = 0.0
    """What streaming optimizer states adds that find no room beside the peak."""
    beyond: int = 0
    """What its code is expected to need beyond the peak of its graphs."""

    @property
    def point(self) -> Point:
        """Its plan of recomputation."""
        return self.field.frontier.points[self.at]

    @property
    def peak_bytes(self) -> int:
        """Of the graphs as they will run."""
        return self.outcome.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the budget is kept."""
        return self.allowed is None or self.peak_bytes <= self.allowed

    @property
    def added_us(self) -> float:
        """What the step takes beyond its compute."""
        return self.point.extra_us + self.outcome.overhead_us + self.states_us

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Smaller is better."""
        return (not self.fits, self.added_us if self.fits else 0.0, self.total_bytes)

    @property
    def total_bytes(self) -> int:
        """The peak with all that lives on beside it, as code."""
        return self.peak_bytes + self.beyond + self.beside.num_bytes

    def plan(self, digest: str, task: Task, budget: int | None, bound_us: float) -> GraphPlan:
        """Return the plan, with its reasons."""
        return GraphPlan(
            graph=digest,
            budget_bytes=None if budget is None else budget - self.beside.num_bytes,
            batch_bytes=task.batch_bytes,
            peak_bytes=self.peak_bytes,
            graph_peak_bytes=self.peak_bytes,
            saved_bytes=self.point.saved_bytes,
            min_peak_bytes=min(self.least, self.field.frontier.min_peak_bytes),
            compute_us=sum(self.field.cost_us),
            measured_us=self.field.measured_us,
            extra_us=self.point.extra_us,
            overhead_us=self.outcome.overhead_us,
            copy_us=self.outcome.copy_us,
            states_us=self.states_us,
            bound_us=bound_us,
            decisions=_decisions(self.field, self.point),
            again=self.field.move.again,
            resident=dict(self.beside.weights),
            pieces=dict(self.beside.pieces),
            bucket_bytes=self.flight.bucket_bytes,
            prefetch_bytes=self.flight.prefetch_bytes,
        )


def better(one: Found, other: Found) -> Found:
    """Return the candidate that is faster, or smaller where nothing fits; of equals the first."""
    best = other if other.rank < one.rank and _is_worth_it(one, other) else one
    return replace(best, least=min(one.least, other.least))


def _is_worth_it(one: Found, other: Found) -> bool:
    """Say whether a change gains more than rounding: a plan that does less is easier to trust."""
    if one.fits != other.fits or not one.fits:
        return True
    gain = one.added_us - other.added_us
    return gain > NOTICEABLE * sum(one.field.cost_us) or (
        gain >= 0 and other.total_bytes < one.total_bytes
    )


def _decisions(among: Field, point: Point) -> tuple[Decision, ...]:
    """List what matters: values that could cross, the biggest first, unread ones behind."""
    model, swapped, places = among.model, among.move.swapped, places_of(among.task.joint)
    moved = {each.node.name for each in swapped}
    kept, again = among.handed_over(point), among.recomputed(point)
    rows = [
        _decision(each.node, each.num_bytes, "offload", each.cost_us, places) for each in swapped
    ]
    for index in among.may_drop:
        node = model.nodes[index]
        if node.name not in moved:
            size = sum(model.sizes[storage] for storage in model.fresh[index])
            action = "keep" if index in kept else "recompute" if index in again else "unused"
            rows.append(_decision(node, size, action, among.cost_us[index], places))
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
