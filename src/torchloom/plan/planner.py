"""From a joint graph and a budget to a plan for it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import fx

from torchloom.errors import PlanError
from torchloom.graph import droppable, graph_digest
from torchloom.plan.costs import CostTable, measured_us, node_us
from torchloom.plan.costs.store import table_to_json
from torchloom.plan.frontier import Frontier, Point, frontier
from torchloom.plan.memory import WorkspaceTable
from torchloom.plan.memory.joint import JointModel, joint_model
from torchloom.plan.model import Decision, GraphPlan, Plan

Verify = Callable[[frozenset[str]], int]
"""Peak bytes of the graphs as they will run when these values are computed again."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A joint graph to plan."""

    joint: fx.Graph
    """Without dead and repeated nodes; values that tags drop already stay dropped."""
    num_results: int
    """How many of its outputs are forward's."""
    verify: Verify | None = None
    """None where nothing moves nodes after the split."""
    batch_bytes: int = 0
    """Inputs that live as long as the step and are no parameters: the batch."""


_ROOT = re.compile(r"^L\['\w+'\](\.__self__)?\.?")
"""How Dynamo names the module that it captured: `L['self'].blocks.0` is `blocks.0`."""


@dataclass
class Planner:
    """Plans graphs under one budget.

    Args:
        budget_bytes: what forward and backward may allocate above what is live before them; None
            keeps every value.
        costs: times of operators.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        pinned: a plan to follow instead of making one.
        is_estimate: whether a compiler that allocates in its own way follows: what does not fit is
            then tried.
    """

    budget_bytes: int | None
    costs: CostTable = field(default_factory=CostTable)
    workspaces: WorkspaceTable = field(default_factory=WorkspaceTable)
    pinned: Plan | None = None
    is_estimate: bool = False
    _known: list[tuple[Task, GraphPlan]] = field(default_factory=list)
    _offsets: dict[str, int] = field(default_factory=dict)
    """By graph: bytes that a compiler's code was found to need beyond its graphs."""
    _tried: dict[str, set[frozenset[str]]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Text of all that choices depend on, for cache keys."""
        costs = hashlib.blake2b(table_to_json(self.costs).encode(), digest_size=8).hexdigest()
        pinned = None if self.pinned is None else self.pinned.digest
        return f"{self.budget_bytes} {costs} {pinned} {sorted(self._offsets.items())}"

    def learn(self, plan: GraphPlan) -> None:
        """Take the difference between a graph and its code into account from now on.

        Args:
            plan: one of this planner's, with the peak of the code that came out.
        """
        self._offsets[plan.graph] = plan.peak_bytes - plan.graph_peak_bytes

    def has_another(self, plan: GraphPlan) -> bool:
        """Say whether, by what was learnt, another plan than those tried may be better."""
        tried = self._tried.setdefault(plan.graph, set())
        tried.add(plan.recompute)
        task = next((task for task, made in self._known if made.graph == plan.graph), None)
        return task is not None and self._make(task).recompute not in tried

    def plan(self, task: Task) -> GraphPlan:
        """Plan one joint graph.

        Raises:
            PlanError: no plan fits (the text holds the least that is possible), or the pinned plan
                is for other graphs.
        """
        if self.pinned is not None:
            return self._follow(self.pinned, task)
        made = self._make(task)
        self._known.append((task, made))
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
        return self.costs.measure(node for task, _ in self._known for node in task.joint.nodes)

    def would_change(self) -> bool:
        """Say whether planning the known graphs by today's costs decides otherwise."""
        return any(self._make(task).recompute != made.recompute for task, made in self._known)

    def _follow(self, pinned: Plan, task: Task) -> GraphPlan:
        joint, verify, budget = task.joint, task.verify, self._budget_of(task)
        digest = graph_digest(joint)
        found = next((each for each in pinned.graphs if each.graph == digest), None)
        if found is None:
            raise PlanError(
                f"the pinned plan holds no graph {digest} (it has "
                f"{', '.join(each.graph for each in pinned.graphs) or 'none'}): model, batch shape, "
                "passes or torch have changed since; plan again, without compile.plan"
            )
        self.workspaces.probe(joint.nodes)
        model = joint_model(joint, task.num_results, self.workspaces)
        allowed = {node.name for node in droppable(joint)}
        unknown = sorted(found.recompute - allowed)
        if unknown:
            raise PlanError(
                f"the pinned plan computes {unknown[0]!r} again in graph {digest}, which cannot be: "
                "it is an input, has side effects, or is not in forward"
            )
        peaks = model.simulate(lambda i: model.nodes[i].name in found.recompute)
        peak_bytes = peaks.peak_bytes if verify is None else verify(found.recompute)
        if budget is not None and peak_bytes > budget:
            raise PlanError(
                f"the pinned plan of graph {digest} adds {peak_bytes:,} bytes, "
                f"{budget:,} are left by compile.memory_budget: raise it, or plan again"
            )
        return replace(
            found,
            peak_bytes=peak_bytes,
            graph_peak_bytes=peak_bytes,
            saved_bytes=peaks.saved_bytes,
            budget_bytes=budget,
            batch_bytes=task.batch_bytes,
        )

    def _budget_of(self, task: Task) -> int | None:
        return None if self.budget_bytes is None else self.budget_bytes - task.batch_bytes

    def _make(self, task: Task) -> GraphPlan:
        joint, budget = task.joint, self._budget_of(task)
        digest = graph_digest(joint)
        self.workspaces.probe(joint.nodes)
        model = joint_model(joint, task.num_results, self.workspaces)
        may_drop = droppable(joint)
        indices = {i for i, node in enumerate(model.nodes) if node in may_drop}
        cost_us = [
            0.0 if model.is_input[i] else node_us(node, self.costs)
            for i, node in enumerate(model.nodes)
        ]
        measured = (measured_us(node, self.costs) for node in model.nodes)
        found = frontier(model, indices, cost_us, max_simulations=num_trials(len(model.nodes)))
        offset = self._offsets.get(digest, 0)
        allowed = None if budget is None else budget - offset
        point, peak_bytes = self._choose(found, model, task, allowed)
        return GraphPlan(
            graph=digest,
            budget_bytes=budget,
            batch_bytes=task.batch_bytes,
            peak_bytes=peak_bytes,
            graph_peak_bytes=peak_bytes,
            saved_bytes=point.saved_bytes,
            min_peak_bytes=found.min_peak_bytes,
            compute_us=sum(cost_us),
            measured_us=sum(each or 0.0 for each in measured),
            extra_us=point.extra_us,
            bound_us=_bound_us(found, point, allowed),
            decisions=_decisions(model, point, indices, cost_us),
        )

    def _choose(
        self, found: Frontier, model: JointModel, task: Task, allowed: int | None
    ) -> tuple[Point, int]:
        """Return the fastest point that fits as it will run, and its peak.

        Passes behind the split change peaks little and in the same direction for all points, so the
        first one that fits is found by halving.
        """
        points = found.points
        peaks: dict[int, int] = {}

        def peak_of(at: int) -> int:
            if at not in peaks:
                peaks[at] = _verified(points[at], model, task.verify)
            return peaks[at]

        if allowed is None or peak_of(0) <= allowed:
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
        least = min(peaks, key=lambda at: peaks[at])
        if self.is_estimate:
            return points[least], peaks[least]
        raise PlanError(infeasible(self._budget_of(task) or 0, peaks[least]))


def infeasible(budget_bytes: int, least: int) -> str:
    """Return the message for a graph that needs at least so many bytes."""
    return (
        f"infeasible: forward and backward may add {budget_bytes:,} bytes, the minimum is "
        f"{least:,}. Raise compile.memory_budget by at least {least - budget_bytes:,} bytes, or make "
        "the batch smaller"
    )


def num_trials(num_nodes: int) -> int:
    """Return how many plans of a graph to simulate: fewer of large ones, to stay within seconds."""
    return max(24, min(160, 400_000 // max(num_nodes, 1)))


def _bound_us(found: Frontier, point: Point, allowed: int | None) -> float:
    if allowed is None:
        return 0.0
    return min(found.bound_us(max(allowed, point.peak_bytes)), point.extra_us)


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
