"""The forms of a joint graph: as it was captured, and with some activations offloaded to the host.

Each form has an exact model of its memory, the times of its operators, and a frontier: the plans of
recomputation that no other one beats in both time and memory.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from torchloom.costs import CostTable, node_us
from torchloom.graph import droppable, movable, source_of
from torchloom.memory import WorkspaceTable
from torchloom.memory.joint import JointModel, joint_model
from torchloom.plan.frontier import CrossingRule, Frontier, FrontierPoint, frontier
from torchloom.plan.problem import PlanCandidate, PlanningProblem, TrialResult

_SHARES = (0.25, 0.5, 1.0, 2.0)
"""Of what a link can carry while compute runs: how much is offloaded, beside all that may be."""
_CHEAP = 0.25
"""What takes less than this part of a copy's time to compute again is never copied."""


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


@dataclass
class GraphForm:
    """One form of a joint graph: its memory, its times and the frontier of its recomputation."""

    problem: PlanningProblem
    costs: CostTable
    workspaces: WorkspaceTable
    offload: Offload
    model: JointModel
    may_drop: set[int]
    """Nodes whose values may be computed again, by index."""
    cost_us: list[float]
    """By index of a node."""
    frontier: Frontier
    results: dict[PlanCandidate, TrialResult] = field(default_factory=dict)
    """What trials of this form have found."""
    _offloaded: dict[tuple[frozenset[str], frozenset[str]], GraphForm] = field(default_factory=dict)

    @cached_property
    def compute_us(self) -> float:
        """Time of all operators, each once."""
        return sum(self.cost_us)

    @cached_property
    def movable(self) -> dict[fx.Node, fx.Node]:
        """Nodes whose memory may wait on the host, with the node that owns that memory."""
        return movable(self.problem.joint)

    @property
    def copied_us(self) -> float:
        """What copies of its offloaded activations take from compute at least."""
        num_bytes = sum(each.num_bytes for each in self.offload.values)
        return self.costs.device.link_load * self.costs.device.round_trip_us() * num_bytes

    @cached_property
    def _rule(self) -> CrossingRule:
        return CrossingRule(self.model, self.may_drop)

    def names(self, point: FrontierPoint) -> frozenset[str]:
        """Return the values that forward does not hand to backward at a point of the frontier."""
        return frozenset(self.model.nodes[i].name for i in point.dropped)

    def handed_over(self, point: FrontierPoint) -> dict[int, int]:
        """Return what forward hands to backward at a point: bytes by the index of the maker."""
        return self._rule.kept(point.dropped)

    def recomputed(self, point: FrontierPoint) -> frozenset[int]:
        """Return the nodes of forward that backward runs again at a point."""
        return frozenset(self._rule.peaks(point.dropped).recomputed)

    def offloaded(self) -> Iterator[GraphForm]:
        """Yield the forms in which a few sets of values wait in host memory, from little to all that may; made once."""
        assert self.problem.offload is not None
        for offload in self._offload_sets():
            key = offload.names, offload.recompute
            if key not in self._offloaded:
                problem = self.problem.offload(*key)
                self._offloaded[key] = form_of(problem, self.costs, self.workspaces, offload)
            yield self._offloaded[key]

    def _offload_sets(self) -> Iterator[Offload]:
        device = self.costs.device
        bytes_per_s = min(device.d2h_bytes_per_s, device.h2d_bytes_per_s)
        cheap = self._last_below(_CHEAP * 1e6 / bytes_per_s)
        waiting = []
        for index, size in self.handed_over(cheap).items():
            node = self.model.nodes[index]
            if size >= self.problem.offload_min_bytes and self.movable.get(node) is node:
                waiting.append(OffloadedValue(node, size, self.cost_us[index]))
        # What is dear to make again for its size; of equals the first ones wait longest.
        waiting.sort(key=lambda each: -each.cost_us / max(each.num_bytes, 1))
        halves_us = [0.0, 0.0]
        for inside, us in zip(self.model.in_forward, self.cost_us, strict=True):
            halves_us[inside] += us
        capacity_bytes = bytes_per_s * min(halves_us) / 1e6
        ends = list(itertools.accumulate(each.num_bytes for each in waiting))
        counts = {bisect.bisect_right(ends, share * capacity_bytes) for share in _SHARES}
        for count in sorted((counts | {len(waiting)}) - {0}):
            yield Offload(tuple(waiting[:count]), self.names(cheap))

    def _last_below(self, us_per_byte: float) -> FrontierPoint:
        """Return the last point from fast to small that costs less per freed byte than a price."""
        points = self.frontier.points
        for faster, smaller in itertools.pairwise(points):
            freed_bytes = faster.peak_bytes - smaller.peak_bytes
            if smaller.extra_us - faster.extra_us > us_per_byte * freed_bytes:
                return faster
        return points[-1]


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
    # What calls of bodies return is there whatever their backwards compute again.
    returned = {source_of(node) for part in problem.parts for node in part.results}
    may_drop = droppable(joint) - returned
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
    return GraphForm(
        problem, costs, workspaces, offload or Offload(), model, indices, cost_us, points
    )


def num_simulations(num_nodes: int) -> int:
    """Return how many plans of a graph to simulate: fewer of large ones, to stay within seconds."""
    return max(24, min(160, 400_000 // max(num_nodes, 1)))
