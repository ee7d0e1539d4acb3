"""From a joint graph and a budget to a plan for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from torchloom.errors import PlanError
from torchloom.graph import droppable, graph_text
from torchloom.plan.costs import CostTable, node_us
from torchloom.plan.frontier import Frontier, Point, frontier
from torchloom.plan.memory import WorkspaceTable
from torchloom.plan.memory.joint import JointModel, joint_model
from torchloom.plan.model import Decision, GraphPlan

Verify = Callable[[frozenset[str]], int]
"""Peak bytes of the graphs as they will run when these values are computed again."""

_MANY_NODES = 4000
_MAX_ROUNDS = 8


@dataclass
class Planner:
    """Plans graphs under one budget.

    Args:
        budget_bytes: what forward and backward may allocate above what is live before them; None
            keeps every value.
        costs: times of operators.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        pinned: plans to use instead, by digest of the graph.
    """

    budget_bytes: int | None
    costs: CostTable = field(default_factory=CostTable)
    workspaces: WorkspaceTable = field(default_factory=WorkspaceTable)
    pinned: dict[str, GraphPlan] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Text of all that choices depend on, for cache keys."""
        pinned = sorted(self.pinned)
        return f"{self.budget_bytes} {self.costs!r} {pinned}"

    def plan(self, joint: fx.Graph, num_results: int, verify: Verify | None = None) -> GraphPlan:
        """Plan one joint graph, without dead and repeated nodes.

        Args:
            joint: the graph; values that tags drop already stay dropped.
            num_results: how many of its outputs are forward's.
            verify: see `Verify`; None where nothing moves nodes after the split.

        Raises:
            PlanError: no plan fits; the text holds the least that is possible.
        """
        digest = digest_of(joint)
        if digest in self.pinned:
            return self.pinned[digest]
        self.workspaces.probe(joint.nodes)
        model = joint_model(joint, num_results, self.workspaces)
        may_drop = droppable(joint)
        indices = {i for i, node in enumerate(model.nodes) if node in may_drop}
        cost_us = [
            0.0 if model.is_input[i] else node_us(node, self.costs)
            for i, node in enumerate(model.nodes)
        ]
        trials = 160 if len(model.nodes) < _MANY_NODES else 48
        found = frontier(model, indices, cost_us, max_simulations=trials)
        point, peak_bytes = self._choose(found, model, verify)
        return GraphPlan(
            graph=digest,
            budget_bytes=self.budget_bytes,
            peak_bytes=peak_bytes,
            saved_bytes=point.saved_bytes,
            min_peak_bytes=found.min_peak_bytes,
            compute_us=sum(cost_us),
            extra_us=point.extra_us,
            bound_us=min(found.bound_us(point.peak_bytes), point.extra_us),
            decisions=_decisions(model, point, indices, cost_us),
        )

    def _choose(
        self, found: Frontier, model: JointModel, verify: Verify | None
    ) -> tuple[Point, int]:
        if self.budget_bytes is None:
            point = found.points[0]
            return point, _verified(point, model, verify)
        allowed = self.budget_bytes
        for _ in range(_MAX_ROUNDS):
            point = found.within(allowed)
            if point is None:
                break
            peak_bytes = _verified(point, model, verify)
            if peak_bytes <= self.budget_bytes:
                return point, peak_bytes
            # What was not modelled counts on top: ask for that much less.
            allowed = min(allowed, point.peak_bytes) - max(1, peak_bytes - self.budget_bytes)
        least = min(found.points, key=lambda p: p.peak_bytes)
        peak_bytes = _verified(least, model, verify)
        if peak_bytes <= self.budget_bytes:
            return least, peak_bytes
        raise PlanError(
            f"infeasible: forward and backward may add {self.budget_bytes:,} bytes, the minimum is "
            f"{peak_bytes:,}. Raise compile.memory_budget by at least "
            f"{peak_bytes - self.budget_bytes:,} bytes, or make the batch smaller"
        )


def digest_of(joint: fx.Graph) -> str:
    """Return a short hash of a joint graph, equal on all ranks that captured the same."""
    return hashlib.blake2b(graph_text(joint).encode(), digest_size=8).hexdigest()


def _verified(point: Point, model: JointModel, verify: Verify | None) -> int:
    if verify is None:
        return point.peak_bytes
    return verify(frozenset(model.nodes[i].name for i in point.dropped))


def _decisions(
    model: JointModel, point: Point, may_drop: set[int], cost_us: list[float]
) -> tuple[Decision, ...]:
    """List what matters: values that could cross, the biggest first."""
    rows = []
    for index in sorted(may_drop):
        size = sum(model.sizes[storage] for storage in model.fresh[index])
        node = model.nodes[index]
        action = "recompute" if index in point.dropped else "keep"
        rows.append(
            Decision(
                value=node.name,
                op=str(node.target).removeprefix("aten."),
                num_bytes=size,
                action=action,
                cost_us=round(cost_us[index], 3),
                where=_where(node),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.num_bytes, row.value)))


def _where(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    names = [path for path, _ in stack.values()]
    return str(names[-1]).replace("L['self'].", "").replace("L['self']", "") if names else ""
