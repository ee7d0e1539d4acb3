"""What a planner knows of the graphs that it has planned: their plans, and what their code needed."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

from torchloom.plan.code_overhead import CodeOverhead
from torchloom.plan.model import GraphPlan
from torchloom.plan.problem import KeptOnDevice, PlanningProblem


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """A graph that was planned, with its problem and its plan."""

    problem: PlanningProblem | None
    """None where its code came from a cache."""
    plan: GraphPlan
    kept_before: KeptOnDevice
    """What stays on the device because of graphs planned before it."""


@dataclass
class KnownGraphs:
    """The graphs that a planner has planned, by digest."""

    agreed: dict[str, GraphPlan] = field(default_factory=dict)
    """By kind: what graphs of it follow as long as it fits."""
    planned: dict[str, PlannedGraph] = field(default_factory=dict)
    """In the order in which graphs were planned first."""
    _overheads: dict[str, CodeOverhead] = field(default_factory=dict)
    """Of the graphs whose code is known."""
    _too_large: set[tuple[object, ...]] = field(default_factory=set)
    """By graph and choices: plans whose code does not fit."""

    @property
    def key(self) -> str:
        """Text of all that later plans depend on, equal on ranks that know the same."""
        overheads = sorted((digest, each.key) for digest, each in self._overheads.items())
        # A plan that was read back has its residents in another order than when it was made.
        kept = [
            (digest, sorted(known.plan.resident.items()), sorted(known.plan.pieces.items()))
            for digest, known in self.planned.items()
        ]
        agreed = sorted((kind, plan.digest) for kind, plan in self.agreed.items())
        return f"{overheads} {kept} {agreed}"

    def with_problems(self) -> list[tuple[PlanningProblem, PlannedGraph]]:
        """Return the graphs that can be planned again, with what is to be planned."""
        graphs = self.planned.values()
        return [(known.problem, known) for known in graphs if known.problem is not None]

    def same_problem(self, digest: str, problem: PlanningProblem) -> PlanningProblem:
        """Return the problem that an equal graph had: what was tried need not be tried again."""
        known = self.planned.get(digest)
        if known is None or known.problem is None or not known.problem.is_like(problem):
            return problem
        return known.problem

    def kept_before(self, digest: str) -> KeptOnDevice:
        """Return what stays on the device because of graphs planned before this one."""
        kept = KeptOnDevice()
        for other, known in self.planned.items():
            if other == digest:
                break  # those planned later have seen what this one keeps
            kept = kept.joined(KeptOnDevice(known.plan.resident, known.plan.pieces))
        return kept

    def highest_bytes_beside(self, digest: str) -> int:
        """Return the highest peak of the other graphs, with their batches."""
        plans = [known.plan for other, known in self.planned.items() if other != digest]
        return max((plan.batch_bytes + plan.peak_bytes for plan in plans), default=0)

    def add(self, digest: str, planned: PlannedGraph) -> None:
        """Note a graph that was planned."""
        self.planned[digest] = planned

    def drop(self, digest: str) -> None:
        """Forget a graph whose code is not used: nothing of it stays on the device."""
        self.planned.pop(digest, None)

    def settle(self, plan: GraphPlan) -> None:
        """Record the plan in use; plans of later graphs count on it."""
        known = self.planned.get(plan.graph)
        if known is None:
            known = PlannedGraph(None, plan, self.kept_before(plan.graph))
        self.planned[plan.graph] = replace(known, plan=plan)

    def learn(self, plan: GraphPlan) -> None:
        """Note what the code of a plan needed, and whether it fits."""
        self._overheads.setdefault(plan.graph, CodeOverhead()).learn(plan)
        if not plan.fits:
            self._too_large.add((plan.graph, *plan.choices))

    def overhead_of(self, digest: str) -> CodeOverhead:
        """Return what code is known to need beyond this graph."""
        return self._overheads.get(digest, CodeOverhead())

    def is_too_large(self, plan: GraphPlan) -> bool:
        """Say whether the code of a plan that decides the same did not fit."""
        return (plan.graph, *plan.choices) in self._too_large

    def forget(self) -> None:
        """Drop the planned graphs and agreements; what code needed is still known."""
        self.planned.clear()
        self.agreed.clear()

    def copy(self) -> KnownGraphs:
        """Return what is known now, which later plans do not change."""
        return KnownGraphs(
            dict(self.agreed),
            dict(self.planned),
            copy.deepcopy(self._overheads),
            set(self._too_large),
        )
