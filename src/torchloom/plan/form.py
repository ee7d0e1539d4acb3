"""The forms of a joint graph: as it was captured, and with some activations offloaded to the host.

Each form has an exact model of its memory, the times of its operators, and a frontier: the plans of
recomputation that no other one beats in both time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from torchloom.costs import CostTable, measured_us, node_us
from torchloom.graph import droppable, movable, source_of
from torchloom.memory import CalledPart, WorkspaceTable
from torchloom.memory.joint import JointModel, joint_model
from torchloom.plan.frontier import Frontier, FrontierPoint, crossing, frontier, peaks_under
from torchloom.plan.problem import PlanCandidate, PlanningProblem, TrialResult


@dataclass(frozen=True, slots=True)
class OffloadedValue:
    """A value that waits in host memory."""

    node: fx.Node
    num_bytes: int
    cost_us: float
    """Of computing it again, which is not done."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Values that wait in host memory, and those that backward computes from what comes back."""

    values: tuple[OffloadedValue, ...] = ()
    recompute: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Names of the values that wait."""
        return frozenset(each.node.name for each in self.values)

    @property
    def num_bytes(self) -> int:
        """Of all values that wait."""
        return sum(each.num_bytes for each in self.values)


@dataclass(slots=True)
class GraphForm:
    """One form of a joint graph: its memory, its times and the frontier of its recomputation."""

    problem: PlanningProblem
    model: JointModel
    may_drop: set[int]
    """Nodes whose values may be computed again, by index."""
    cost_us: list[float]
    """By index of a node."""
    frontier: Frontier
    measured_us: float = 0.0
    """Of the time of all nodes, what was measured."""
    offload: Offload = field(default_factory=Offload)
    results: dict[PlanCandidate, TrialResult] = field(default_factory=dict)
    """What trials of this form have found."""
    _offloaded: dict[tuple[frozenset[str], frozenset[str]], GraphForm] = field(default_factory=dict)
    _movable: dict[fx.Node, fx.Node] | None = None

    @property
    def compute_us(self) -> float:
        """Time of all operators, each once."""
        return sum(self.cost_us)

    @property
    def movable(self) -> dict[fx.Node, fx.Node]:
        """Nodes whose memory may wait on the host, with the node that owns that memory."""
        if self._movable is None:
            self._movable = movable(self.problem.joint)
        return self._movable

    def names(self, point: FrontierPoint) -> frozenset[str]:
        """Return the values that forward does not hand to backward at a point of the frontier."""
        return frozenset(self.model.nodes[i].name for i in point.dropped)

    def handed_over(self, point: FrontierPoint) -> dict[int, int]:
        """Return what forward hands to backward at a point: bytes by the index of the maker."""
        return crossing(self.model, self.may_drop, point.dropped)

    def recomputed(self, point: FrontierPoint) -> frozenset[int]:
        """Return the nodes of forward that backward runs again at a point."""
        return frozenset(peaks_under(self.model, self.may_drop, point.dropped).recomputed)

    def offloaded(self, offload: Offload, costs: CostTable, table: WorkspaceTable) -> GraphForm:
        """Return the form in which values of this one wait in host memory; made once.

        Args:
            offload: which values, and what is computed again from them.
            costs: times of operators.
            table: what operators allocate for themselves.
        """
        key = offload.names, offload.recompute
        if key not in self._offloaded:
            assert self.problem.offload is not None
            self._offloaded[key] = form_of(self.problem.offload(*key), costs, table, offload)
        return self._offloaded[key]


class FormCache:
    """Forms of graphs, for as long as times are what they were: a graph is planned several times."""

    def __init__(self) -> None:
        self._known: list[tuple[GraphForm, CostTable]] = []

    def form_of(
        self, problem: PlanningProblem, costs: CostTable, workspaces: WorkspaceTable
    ) -> GraphForm:
        """Return the form of this very problem under this very table, made where it is new.

        Args:
            problem: the graph as it was captured.
            costs: times of its operators.
            workspaces: what operators allocate for themselves; unknown ones are probed.
        """
        for known, table in self._known:
            if known.problem is problem and table is costs:
                return known
        made = form_of(problem, costs, workspaces)
        self._known.append((made, costs))
        return made

    def clear(self) -> None:
        """Drop all forms: graphs or times are about to change."""
        self._known.clear()


def form_of(
    problem: PlanningProblem,
    costs: CostTable,
    workspaces: WorkspaceTable,
    offload: Offload | None = None,
) -> GraphForm:
    """Describe one form of a graph and search its frontier.

    Args:
        problem: the graph.
        costs: times of its operators.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        offload: what waits in host memory in this form.
    """
    joint = problem.joint
    workspaces.probe(joint.nodes)
    model = joint_model(joint, problem.num_results, workspaces)
    may_drop = droppable(joint) - _results_of(problem.parts)
    indices = {i for i, node in enumerate(model.nodes) if node in may_drop}
    cost_us = [
        0.0 if model.is_input[i] else node_us(node, costs) for i, node in enumerate(model.nodes)
    ]
    kinds = {node: (part.call, part.body) for part in problem.parts for node in part.names}
    points = frontier(
        model,
        indices,
        cost_us,
        max_simulations=num_simulations(len(model.nodes)),
        parts={i: kinds[node] for i, node in enumerate(model.nodes) if node in kinds},
    )
    measured = sum(measured_us(node, costs) or 0.0 for node in model.nodes)
    return GraphForm(problem, model, indices, cost_us, points, measured, offload or Offload())


def _results_of(parts: Sequence[CalledPart]) -> set[fx.Node]:
    """Return what calls of bodies return: it is there whatever their backwards compute again."""
    return {source_of(node) for part in parts for node in part.results}


def num_simulations(num_nodes: int) -> int:
    """Return how many plans of a graph to simulate: fewer of large ones, to stay within seconds."""
    return max(24, min(160, 400_000 // max(num_nodes, 1)))
