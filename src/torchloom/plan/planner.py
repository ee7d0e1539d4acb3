"""The planner of a run: plans its graphs one by one, under one budget for all of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from torchloom.costs import CostTable
from torchloom.costs.store import table_to_json
from torchloom.errors import PlanError, RegionError
from torchloom.graph import graph_digest
from torchloom.memory import Transit, WorkspaceTable
from torchloom.plan.follow import Follower
from torchloom.plan.form import FormCache
from torchloom.plan.known import KnownGraphs, PlannedGraph
from torchloom.plan.limits import PlanLimits
from torchloom.plan.model import GraphPlan, Plan
from torchloom.plan.problem import KeptOnDevice, PlanningProblem
from torchloom.plan.search import Search
from torchloom.plan.states import HostStates, StateCosts
from torchloom.plan.tried import NOTICEABLE

_WORTH_BODIES = 0.05
"""Part of a graph's time that is worth another compile of a graph that calls bodies, whose users want to begin."""
_LITTLE_ROOM = 0.05
"""Part of the budget that is worth no search for another plan of such a graph, unless recomputation is dear."""


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
        micro_steps: forwards and backwards per optimizer step, which a resident weight is gathered
            once for.
        transit: what collectives hold until they are waited for; None where nothing is sent.
        states: optimizer states that wait on the host unless there is room; None where they stay.
        base_bytes: what lives on in any case, which the budget does not count and its user does.
        prefetch_is_bound: whether plans may prefetch less than `prefetch` is given, and never more.
    """

    budget_bytes: int | None
    costs: CostTable = field(default_factory=CostTable)
    workspaces: WorkspaceTable = field(default_factory=WorkspaceTable)
    pinned: Plan | None = None
    is_estimate: bool = False
    micro_steps: int = 1
    transit: Transit | None = None
    states: HostStates | None = None
    base_bytes: int = 0
    prefetch_is_bound: bool = False
    _known: KnownGraphs = field(default_factory=KnownGraphs)
    _forms: FormCache = field(default_factory=FormCache)

    @property
    def key(self) -> str:
        """Text of all that choices depend on, for cache keys."""
        return f"{self.common_key} {self._known.key}"

    @property
    def common_key(self) -> str:
        """The part that graphs planned so far do not change: ranks may have captured others."""
        costs = hashlib.blake2b(table_to_json(self.costs).encode(), digest_size=8).hexdigest()
        pinned = None if self.pinned is None else self.pinned.digest
        kept = f"{self.budget_bytes} {self.states}"
        return f"{kept} {self.micro_steps} {costs} {pinned} {self.prefetch_is_bound}"

    @property
    def agreed(self) -> dict[str, GraphPlan]:
        """By kind: the plan that graphs of it follow as long as it fits."""
        return self._known.agreed

    @property
    def num_known(self) -> int:
        """How many graphs were planned since the last `forget`."""
        return len(self._known.with_problems())

    def plan(self, problem: PlanningProblem) -> GraphPlan:
        """Plan one joint graph.

        Raises:
            PlanError: no plan fits (the text holds the least that is possible), or the pinned plan
                is for other graphs.
            RegionError: no plan fits that decides about calls of bodies; one of all nodes may.
        """
        digest = graph_digest(problem.joint)
        kept_before = self._known.kept_before(digest)
        problem = self._known.same_problem(digest, problem)
        plan = self._made(problem, digest, kept_before)
        if problem.parts and not self._is_expected_to_fit(plan):
            raise RegionError("no choice about equal parts keeps the memory budget")
        self._known.add(digest, PlannedGraph(problem, plan, kept_before))
        return plan

    def refusal(self, graph_budget_bytes: int, least_bytes: int) -> str:
        """Return the message for a graph that does not fit.

        Args:
            graph_budget_bytes: what forward and backward may add.
            least_bytes: what they need at least.
        """
        lacking_bytes = least_bytes - graph_budget_bytes
        asked_bytes = (self.budget_bytes or 0) + self.base_bytes
        return (
            f"infeasible: forward and backward may add {graph_budget_bytes:,} bytes, the minimum is "
            f"{least_bytes:,}. Raise compile.memory_budget by at least {lacking_bytes:,} bytes, to "
            f"{asked_bytes + lacking_bytes:,}, or make the batch smaller"
        )

    def learn(self, plan: GraphPlan) -> None:
        """Count on the difference between a graph and its code from now on.

        Args:
            plan: one of this planner's, with the peak of the code that came out.
        """
        self._known.learn(plan)

    def has_another(self, plan: GraphPlan) -> bool:
        """Say whether, by what was learned, a plan not compiled yet may be noticeably better."""
        known = self._known.planned.get(plan.graph)
        if known is None or known.problem is None:
            return False
        least_us = (_WORTH_BODIES if known.problem.parts else NOTICEABLE) * plan.compute_us
        if plan.fits and plan.extra_us + plan.copy_us + plan.states_us <= least_us:
            return False
        if known.problem.parts and self._has_little_room(known.problem, plan, least_us):
            return False
        other = self._made(known.problem, plan.graph, known.kept_before)
        if known.problem.parts and plan.fits and plan.step_us - other.step_us <= least_us:
            return False
        return not self._known.overhead_of(plan.graph).knows(other)

    def _has_little_room(self, problem: PlanningProblem, plan: GraphPlan, least_us: float) -> bool:
        """Say whether what code leaves of the budget is little, and would spare little recomputation."""
        room_bytes = (plan.budget_bytes or 0) - plan.peak_bytes
        if not plan.fits or room_bytes > _LITTLE_ROOM * (plan.budget_bytes or 0):
            return False
        points = self._forms.form_of(problem, self.costs, self.workspaces).frontier.points
        own = min(points, key=lambda each: abs(each.extra_us - plan.extra_us))
        fitting = (each for each in points if each.peak_bytes <= own.peak_bytes + room_bytes)
        return own.extra_us - next(fitting, own).extra_us <= least_us

    def settle(self, plan: GraphPlan) -> None:
        """Record the plan in use; plans of later graphs count on it.

        Args:
            plan: the best of several, or one that came with cached code.
        """
        self._known.settle(plan)

    def drop(self, plan: GraphPlan) -> None:
        """Forget the graph of a plan, because another graph is compiled in its place.

        Args:
            plan: one of this planner's, whose code is not used.
        """
        self._known.drop(plan.graph)

    def forget(self) -> None:
        """Drop the graphs planned so far: they are about to be captured anew."""
        self._known.forget()
        self._forms.clear()

    def remember(self) -> PlannerSnapshot:
        """Return what it takes to come back to this point."""
        return PlannerSnapshot(self.costs, self._known.copy())

    def restore(self, snapshot: PlannerSnapshot) -> None:
        """Come back to a point: ranks that do so plan alike, whatever they planned since."""
        self.costs, self._known = snapshot.costs, snapshot.known.copy()
        self._forms.clear()

    def measure(self) -> int:
        """Measure operators of the known graphs, one at a time; return how many were new."""
        self._forms.clear()
        problems = [problem for problem, _ in self._known.with_problems()]
        return self.costs.measure(node for problem in problems for node in problem.joint.nodes)

    def would_change(self) -> bool:
        """Say whether planning the known graphs by today's costs decides otherwise."""
        return any(
            self._made(problem, known.plan.graph, known.kept_before).choices != known.plan.choices
            for problem, known in self._known.with_problems()
        )

    def _made(self, problem: PlanningProblem, digest: str, kept_before: KeptOnDevice) -> GraphPlan:
        """Return the plan that was given for a graph, where there is one, else the best that is found."""
        limits = self._limits(problem, digest, kept_before)
        follower = Follower(limits=limits, workspaces=self.workspaces, is_estimate=self.is_estimate)
        plan = follower.given(problem, digest, self.pinned, self._known.agreed.get(problem.kind))
        if plan is not None and (self.pinned is not None or not self._known.is_too_large(plan)):
            return plan
        search = Search(self.costs, self.workspaces, limits, self._forms, self.micro_steps)
        plan = search.run(problem, digest)
        if not plan.fits and not self.is_estimate and not problem.parts:
            least_bytes = plan.peak_bytes + plan.beside_bytes
            raise PlanError(self.refusal(limits.budget_bytes or 0, least_bytes))
        return plan

    def _is_expected_to_fit(self, plan: GraphPlan) -> bool:
        code_bytes = self._known.overhead_of(plan.graph).bytes_of(plan.offload)
        return plan.budget_bytes is None or plan.peak_bytes + code_bytes <= plan.budget_bytes

    def _limits(
        self, problem: PlanningProblem, digest: str, kept_before: KeptOnDevice
    ) -> PlanLimits:
        overhead = self._known.overhead_of(digest)
        if self.budget_bytes is None:
            return PlanLimits(overhead=overhead, kept_before=kept_before)
        kept_bytes = self.budget_bytes - self._known.highest_bytes_beside(digest)
        states = None
        if self.states is not None:
            states = StateCosts(self.states, self.costs.device, self.micro_steps, kept_bytes)
        return PlanLimits(
            budget_bytes=self.budget_bytes - problem.batch_bytes,
            overhead=overhead,
            kept_before=kept_before,
            kept_bytes=kept_bytes,
            states=states,
        )


@dataclass(frozen=True, slots=True)
class PlannerSnapshot:
    """What a planner knew at some point."""

    costs: CostTable
    known: KnownGraphs
