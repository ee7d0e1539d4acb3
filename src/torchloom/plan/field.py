"""One form of a joint graph, and all plans of its recomputation.

A graph has several forms: as it was captured, and with this or that activation moved to host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from torchloom.costs import CostTable, measured_us, node_us
from torchloom.graph import droppable
from torchloom.memory import WorkspaceTable
from torchloom.memory.joint import JointModel, joint_model
from torchloom.plan.frontier import Frontier, Point, crossing, frontier, peaks_under
from torchloom.plan.task import Outcome, Task, Trial


@dataclass(frozen=True, slots=True)
class Swapped:
    """A value that waits in host memory."""

    node: fx.Node
    num_bytes: int
    cost_us: float
    """Of computing it again, which is not done."""


@dataclass(frozen=True, slots=True)
class Move:
    """Values that wait in host memory, and those that backward computes from what comes back."""

    swapped: tuple[Swapped, ...] = ()
    again: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Names of the values that wait."""
        return frozenset(each.node.name for each in self.swapped)


@dataclass(slots=True)
class Field:
    """One form of a joint graph, and all plans of its recomputation."""

    task: Task
    model: JointModel
    may_drop: set[int]
    cost_us: list[float]
    frontier: Frontier
    measured_us: float = 0.0
    """Of the time of all nodes, what was measured."""
    move: Move = field(default_factory=Move)
    _seen: dict[Trial, Outcome] = field(default_factory=dict)
    _moved: dict[tuple[frozenset[str], frozenset[str]], Field] = field(default_factory=dict)

    def outcome(self, point: Point, trial: Trial) -> Outcome:
        """Return what becomes of a plan as it will run."""
        if self.task.verify is None:
            return Outcome(point.peak_bytes)
        if trial not in self._seen:
            self._seen[trial] = self.task.verify(trial)
        return self._seen[trial]

    def knows(self, trial: Trial) -> bool:
        """Say whether the outcome of a trial costs nothing: it was tried before."""
        return self.task.verify is None or trial in self._seen

    def moved(self, move: Move, make: Callable[[Task, Move], Field]) -> Field:
        """Return the form of this one in which values wait in host memory; made once."""
        key = move.names, move.again
        if key not in self._moved:
            assert self.task.swap is not None
            self._moved[key] = make(self.task.swap(*key), move)
        return self._moved[key]

    def names(self, point: Point) -> frozenset[str]:
        """Return the values that a plan does not hand to backward."""
        return frozenset(self.model.nodes[i].name for i in point.dropped)

    def handed_over(self, point: Point) -> dict[int, int]:
        """Return what forward hands to backward under a plan: bytes by the index of the maker."""
        return crossing(self.model, self.may_drop, point.dropped)

    def recomputed(self, point: Point) -> frozenset[int]:
        """Return the nodes of forward that backward runs again under a plan."""
        return frozenset(peaks_under(self.model, self.may_drop, point.dropped).recomputed)


class Fields:
    """Fields of tasks, for as long as times are what they were: a task is planned several times."""

    def __init__(self) -> None:
        self._known: list[tuple[Field, CostTable]] = []

    def get(self, task: Task, costs: CostTable) -> Field | None:
        """Return the field of this very task under this very table."""
        for found, table in self._known:
            if found.task is task and table is costs:
                return found
        return None

    def put(self, found: Field, costs: CostTable) -> None:
        """Remember a field."""
        self._known.append((found, costs))

    def clear(self) -> None:
        """Forget all fields: graphs or times are about to change."""
        self._known.clear()


def field_of(
    task: Task, costs: CostTable, workspaces: WorkspaceTable, move: Move | None = None
) -> Field:
    """Find all plans of recomputation of one form of a graph.

    Args:
        task: the graph.
        costs: times of its operators.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        move: what waits in host memory in this form.
    """
    joint = task.joint
    workspaces.probe(joint.nodes)
    model = joint_model(joint, task.num_results, workspaces)
    may_drop = droppable(joint)
    indices = {i for i, node in enumerate(model.nodes) if node in may_drop}
    cost_us = [
        0.0 if model.is_input[i] else node_us(node, costs) for i, node in enumerate(model.nodes)
    ]
    found = frontier(model, indices, cost_us, max_simulations=num_trials(len(model.nodes)))
    measured = sum(measured_us(node, costs) or 0.0 for node in model.nodes)
    return Field(task, model, indices, cost_us, found, measured, move or Move())


def num_trials(num_nodes: int) -> int:
    """Return how many plans of a graph to simulate: fewer of large ones, to stay within seconds."""
    return max(24, min(160, 400_000 // max(num_nodes, 1)))
