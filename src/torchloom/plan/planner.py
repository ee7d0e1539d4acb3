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
    _withheld: dict[str, int] = field(default_factory=dict)
    """By graph: bytes that a compiler's code was found to need beyond the plan."""

    @property
    def key(self) -> str:
        """Text of all that choices depend on, for cache keys."""
        costs = hashlib.blake2b(table_to_json(self.costs).encode(), digest_size=8).hexdigest()
        pinned = None if self.pinned is None else self.pinned.digest
        return f"{self.budget_bytes} {costs} {pinned} {sorted(self._withheld.items())}"

    def tighten(self, graph: str, num_bytes: int) -> None:
        """Plan a graph for less than the budget from now on.

        Args:
            graph: its digest.
            num_bytes: how much less, on top of what was said before.
        """
        self._withheld[graph] = self._withheld.get(graph, 0) + num_bytes

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
        withheld = self._withheld.get(digest, 0)
        point, peak_bytes = self._choose(found, model, verify, withheld)
        return GraphPlan(
            graph=digest,
            budget_bytes=self.budget_bytes,
            peak_bytes=peak_bytes,
            saved_bytes=point.saved_bytes,
            min_peak_bytes=found.min_peak_bytes,
            compute_us=sum(cost_us),
            extra_us=point.extra_us,
            bound_us=self._bound_us(found, point, withheld),
            decisions=_decisions(model, point, indices, cost_us),
        )

    def _bound_us(self, found: Frontier, point: Point, withheld: int) -> float:
        if self.budget_bytes is None:
            return 0.0
        allowed = max(self.budget_bytes - withheld, point.peak_bytes)
        return min(found.bound_us(allowed), point.extra_us)

    def _choose(
        self, found: Frontier, model: JointModel, verify: Verify | None, withheld: int
    ) -> tuple[Point, int]:
        """Return the fastest point that fits as it will run, and its peak.

        Passes behind the split change peaks little and in the same direction for all points, so the
        first one that fits is found by halving.
        """
        points = found.points
        peaks: dict[int, int] = {}

        def peak_of(at: int) -> int:
            if at not in peaks:
                peaks[at] = _verified(points[at], model, verify)
            return peaks[at]

        if self.budget_bytes is None:
            return points[0], peak_of(0)
        allowed = self.budget_bytes - withheld
        if peak_of(0) <= allowed:
            return points[0], peak_of(0)
        low, high = 0, len(points) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if peak_of(middle) <= allowed else (middle, high)
        fitting = [at for at in range(len(points)) if at in peaks and peaks[at] <= allowed]
        if high not in peaks and peak_of(high) <= allowed:
            fitting.append(high)
        if fitting:
            best = min(fitting)
            return points[best], peaks[best]
        raise PlanError(self._infeasible(min(peaks.values()) + withheld))

    def _infeasible(self, least: int) -> str:
        assert self.budget_bytes is not None
        return (
            f"infeasible: forward and backward may add {self.budget_bytes:,} bytes, the minimum is "
            f"{least:,}. Raise compile.memory_budget by at least {least - self.budget_bytes:,} "
            "bytes, or make the batch smaller"
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
