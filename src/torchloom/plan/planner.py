"""From a joint graph and a budget to a plan for it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import fx

from torchloom.errors import PlanError
from torchloom.graph import droppable, graph_text
from torchloom.plan.costs import CostTable, node_us
from torchloom.plan.costs.store import table_to_json
from torchloom.plan.frontier import Frontier, Point, frontier
from torchloom.plan.memory import WorkspaceTable
from torchloom.plan.memory.joint import JointModel, joint_model
from torchloom.plan.model import Decision, GraphPlan, Plan

Verify = Callable[[frozenset[str]], int]
"""Peak bytes of the graphs as they will run when these values are computed again."""


@dataclass(frozen=True)
class _Known:
    joint: fx.Graph
    num_results: int
    verify: Verify | None
    plan: GraphPlan


_ROOT = re.compile(r"^L\['\w+'\](\.__self__)?\.?")
"""How Dynamo names the module that it captured: `L['self'].blocks.0` is `blocks.0`."""

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
        pinned: a plan to follow instead of making one.
    """

    budget_bytes: int | None
    costs: CostTable = field(default_factory=CostTable)
    workspaces: WorkspaceTable = field(default_factory=WorkspaceTable)
    pinned: Plan | None = None
    _known: list[_Known] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Text of all that choices depend on, for cache keys."""
        costs = hashlib.blake2b(table_to_json(self.costs).encode(), digest_size=8).hexdigest()
        pinned = None if self.pinned is None else self.pinned.digest
        return f"{self.budget_bytes} {costs} {pinned}"

    def plan(self, joint: fx.Graph, num_results: int, verify: Verify | None = None) -> GraphPlan:
        """Plan one joint graph, without dead and repeated nodes.

        Args:
            joint: the graph; values that tags drop already stay dropped.
            num_results: how many of its outputs are forward's.
            verify: see `Verify`; None where nothing moves nodes after the split.

        Raises:
            PlanError: no plan fits (the text holds the least that is possible), or the pinned plan
                is for other graphs.
        """
        if self.pinned is not None:
            return self._follow(self.pinned, joint, num_results, verify)
        made = self._make(joint, num_results, verify)
        self._known.append(_Known(joint, num_results, verify, made))
        return made

    @property
    def num_known(self) -> int:
        """How many graphs were planned since the last `forget`."""
        return len(self._known)

    def forget(self) -> None:
        """Drop the graphs planned so far: they are about to be captured anew."""
        self._known.clear()

    def measure(self) -> int:
        """Measure operators of the known graphs, one at a time; return how many were new."""
        return self.costs.measure(node for each in self._known for node in each.joint.nodes)

    def would_change(self) -> bool:
        """Say whether planning the known graphs by today's costs decides otherwise."""
        again = (self._make(k.joint, k.num_results, k.verify) for k in self._known)
        return any(
            new.recompute != k.plan.recompute for new, k in zip(again, self._known, strict=True)
        )

    def _follow(
        self, pinned: Plan, joint: fx.Graph, num_results: int, verify: Verify | None
    ) -> GraphPlan:
        digest = digest_of(joint)
        found = next((each for each in pinned.graphs if each.graph == digest), None)
        if found is None:
            raise PlanError(
                f"the pinned plan holds no graph {digest} (it has "
                f"{', '.join(each.graph for each in pinned.graphs) or 'none'}): model, batch shape, "
                "passes or torch have changed since; plan again, without compile.plan"
            )
        self.workspaces.probe(joint.nodes)
        model = joint_model(joint, num_results, self.workspaces)
        allowed = {node.name for node in droppable(joint)}
        unknown = sorted(found.recompute - allowed)
        if unknown:
            raise PlanError(
                f"the pinned plan computes {unknown[0]!r} again in graph {digest}, which cannot be: "
                "it is an input, has side effects, or is not in forward"
            )
        peaks = model.simulate(lambda i: model.nodes[i].name in found.recompute)
        peak_bytes = peaks.peak_bytes if verify is None else verify(found.recompute)
        if self.budget_bytes is not None and peak_bytes > self.budget_bytes:
            raise PlanError(
                f"the pinned plan of graph {digest} adds {peak_bytes:,} bytes, "
                f"{self.budget_bytes:,} are left by compile.memory_budget: raise it, or plan again"
            )
        return replace(
            found,
            peak_bytes=peak_bytes,
            saved_bytes=peaks.saved_bytes,
            budget_bytes=self.budget_bytes,
        )

    def _make(self, joint: fx.Graph, num_results: int, verify: Verify | None) -> GraphPlan:
        digest = digest_of(joint)
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
    paths = [str(path) for path, _ in stack.values()]
    return _ROOT.sub("", paths[-1]) if paths else ""
