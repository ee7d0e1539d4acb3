"""The planner of a run: it plans graphs one by one under one budget, from the problem to what their code needed."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torchloom.costs import CostTable
from torchloom.costs.store import table_to_json
from torchloom.errors import PlanError, RegionError
from torchloom.graph import digest_of, graph_digest
from torchloom.memory import Transit, WorkspaceTable
from torchloom.plan.follow import followed
from torchloom.plan.form import GraphForm, form_of
from torchloom.plan.model import GraphPlan, Plan
from torchloom.plan.problem import CodeOverhead, KeptOnDevice, PlanLimits, PlanningProblem
from torchloom.plan.search import best_plan
from torchloom.plan.states import HostStates
from torchloom.plan.trials import NOTICEABLE

_WORTH_BODIES = 0.05
"""Part of a graph's time that is worth another compile of a graph that calls bodies, whose users want to begin."""
_LITTLE_ROOM = 0.05
"""Part of the budget that is worth no search for another plan of such a graph, unless recomputation is dear."""


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """A graph that was planned."""

    problem: PlanningProblem | None
    """None where its code came from a cache."""
    plan: GraphPlan
    kept_before: KeptOnDevice
    """What stays on the device because of graphs planned before it."""


class PlannerSnapshot(NamedTuple):
    """What a planner knew at some point."""

    costs: CostTable
    agreed: dict[str, GraphPlan]
    planned: dict[str, PlannedGraph]
    overheads: dict[str, CodeOverhead]
    too_large: set[Hashable]

    def copied(self) -> PlannerSnapshot:
        """Return the same in containers of its own."""
        overheads = copy.deepcopy(self.overheads)
        planned = dict(self.planned)
        return PlannerSnapshot(
            self.costs, dict(self.agreed), planned, overheads, set(self.too_large)
        )


@dataclass
class Planner:
    """Plans graphs under one budget.

    Args:
        room_bytes: what forward and backward may allocate above what is live before them: the user's
            budget without `base_bytes`; None keeps every value.
        costs: times of operators.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        pinned: a plan to follow instead of making one.
        is_estimate: whether a compiler that allocates in its own way follows: what does not fit is
            then tried.
        micro_steps: forwards and backwards per optimizer step, which a resident weight is gathered
            once for.
        transit: what collectives hold until they are waited for; None where nothing is sent.
        states: optimizer states that wait on the host unless there is room; None where they stay.
        base_bytes: what lives on in any case.
        prefetch_is_bound: whether plans may prefetch less than `prefetch` is given, and never more.
    """

    room_bytes: int | None
    costs: CostTable = field(default_factory=CostTable)
    workspaces: WorkspaceTable = field(default_factory=WorkspaceTable)
    pinned: Plan | None = None
    is_estimate: bool = False
    micro_steps: int = 1
    transit: Transit | None = None
    states: HostStates | None = None
    base_bytes: int = 0
    prefetch_is_bound: bool = False
    agreed: dict[str, GraphPlan] = field(default_factory=dict)
    """By kind: the plan that graphs of it follow as long as it fits."""
    _planned: dict[str, PlannedGraph] = field(default_factory=dict)
    """By digest, in the order in which graphs were planned first."""
    _overheads: dict[str, CodeOverhead] = field(default_factory=dict)
    """Of the graphs whose code is known."""
    _too_large: set[Hashable] = field(default_factory=set)
    """By graph and choices: plans whose code does not fit."""
    _forms: list[GraphForm] = field(default_factory=list)
    """A graph is planned several times: its forms are kept for as long as times are what they were."""

    @property
    def key(self) -> str:
        """Text of all that choices depend on, for cache keys."""
        overheads = sorted((digest, each.key) for digest, each in self._overheads.items())
        # A plan that was read back has its residents in another order than when it was made.
        kept = [
            (digest, sorted(known.plan.resident.items()), sorted(known.plan.pieces.items()))
            for digest, known in self._planned.items()
        ]
        agreed = sorted((kind, plan.digest) for kind, plan in self.agreed.items())
        return f"{self.common_key} {overheads} {kept} {agreed}"

    @property
    def common_key(self) -> str:
        """The part that graphs planned so far do not change: ranks may have captured others."""
        costs = digest_of(table_to_json(self.costs))
        pinned = None if self.pinned is None else self.pinned.digest
        kept = f"{self.room_bytes} {self.states}"
        return f"{kept} {self.micro_steps} {costs} {pinned} {self.prefetch_is_bound}"

    @property
    def num_known(self) -> int:
        """How many graphs were planned since the last `forget`."""
        return len(self._with_problems())

    def plan(self, problem: PlanningProblem) -> GraphPlan:
        """Plan one joint graph: follow the plan that was given for it, or search the best one.

        Raises:
            PlanError: no plan fits (the text holds the least that is possible), or the pinned plan
                is for other graphs.
            RegionError: no plan fits that decides about calls of bodies; one of all nodes may.
        """
        digest = graph_digest(problem.joint)
        known = self._planned.get(digest)
        if known is not None and known.problem is not None and known.problem.is_like(problem):
            problem = known.problem  # what was tried need not be tried again
        kept_before = self._kept_before(digest)
        plan = self._made(problem, digest, kept_before)
        if problem.parts and not self._overhead_of(plan.graph).fits(plan):
            raise RegionError("no choice about equal parts keeps the memory budget")
        self._planned[digest] = PlannedGraph(problem, plan, kept_before)
        return plan

    def _made(self, problem: PlanningProblem, digest: str, kept_before: KeptOnDevice) -> GraphPlan:
        """Return the plan that was given for a graph, where there is one, else the best that is found."""
        limits = self._limits(problem, digest, kept_before)
        given = self._given(problem, digest, limits)
        if given is not None:
            return given
        plan = best_plan(self._form_of(problem), limits, digest)
        if not plan.fits and not self.is_estimate and not problem.parts:
            least_bytes = plan.peak_bytes + plan.beside_bytes
            raise PlanError(self.refusal(limits.budget_bytes or 0, least_bytes))
        return plan

    def _given(self, problem: PlanningProblem, digest: str, limits: PlanLimits) -> GraphPlan | None:
        """Return the pinned plan of a graph, or the one that its kind follows and that fits."""
        is_pinned = self.pinned is not None
        try:
            plan = followed(
                self.pinned or self.agreed.get(problem.kind),
                problem,
                digest,
                limits,
                self.workspaces,
                is_estimate=self.is_estimate,
            )
        except PlanError:
            if is_pinned:
                raise
            return None
        is_too_large = plan is not None and (plan.graph, *plan.choices) in self._too_large
        return plan if is_pinned or not is_too_large else None

    def _limits(
        self, problem: PlanningProblem, digest: str, kept_before: KeptOnDevice
    ) -> PlanLimits:
        limits = PlanLimits(
            overhead=self._overhead_of(digest),
            kept_before=kept_before,
            micro_steps=self.micro_steps,
        )
        if self.room_bytes is None:
            return limits
        others = [known.plan for other, known in self._planned.items() if other != digest]
        highest = max((plan.batch_bytes + plan.peak_bytes for plan in others), default=0)
        return replace(
            limits,
            budget_bytes=self.room_bytes - problem.batch_bytes,
            kept_bytes=self.room_bytes - highest,
            states=self.states,
        )

    def _kept_before(self, digest: str) -> KeptOnDevice:
        kept = KeptOnDevice()
        for other, known in self._planned.items():
            if other == digest:
                break  # those planned later have seen what this one keeps
            kept = kept.joined(KeptOnDevice(known.plan.resident, known.plan.pieces))
        return kept

    def _form_of(self, problem: PlanningProblem) -> GraphForm:
        """Return the form of this very problem under the present costs, made where it is new."""
        for form in self._forms:
            if form.problem is problem and form.costs is self.costs:
                return form
        self._forms.append(form_of(problem, self.costs, self.workspaces))
        return self._forms[-1]

    def _overhead_of(self, digest: str) -> CodeOverhead:
        return self._overheads.get(digest, CodeOverhead())

    def refusal(self, graph_budget_bytes: int, least_bytes: int) -> str:
        """Return the message for a graph that does not fit.

        Args:
            graph_budget_bytes: what forward and backward may add.
            least_bytes: what they need at least.
        """
        lacking_bytes = least_bytes - graph_budget_bytes
        asked_bytes = (self.room_bytes or 0) + self.base_bytes
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
        self._overheads.setdefault(plan.graph, CodeOverhead()).learn(plan)
        if not plan.fits:
            self._too_large.add((plan.graph, *plan.choices))

    def has_another(self, plan: GraphPlan) -> bool:
        """Say whether, by what was learned, a plan not compiled yet may be noticeably better."""
        known = self._planned.get(plan.graph)
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
        return not self._overhead_of(plan.graph).knows(other)

    def _has_little_room(self, problem: PlanningProblem, plan: GraphPlan, least_us: float) -> bool:
        """Say whether what code leaves of the budget is little, and would spare little recomputation."""
        room_bytes = (plan.budget_bytes or 0) - plan.peak_bytes
        if not plan.fits or room_bytes > _LITTLE_ROOM * (plan.budget_bytes or 0):
            return False
        points = self._form_of(problem).frontier.points
        own = min(points, key=lambda each: abs(each.extra_us - plan.extra_us))
        fitting = (each for each in points if each.peak_bytes <= own.peak_bytes + room_bytes)
        return own.extra_us - next(fitting, own).extra_us <= least_us

    def settle(self, plan: GraphPlan) -> None:
        """Record the plan in use; plans of later graphs count on it.

        Args:
            plan: the best of several, or one that came with cached code.
        """
        known = self._planned.get(plan.graph)
        if known is None:
            known = PlannedGraph(None, plan, self._kept_before(plan.graph))
        self._planned[plan.graph] = replace(known, plan=plan)

    def drop(self, plan: GraphPlan) -> None:
        """Forget the graph of a plan whose code is not used: nothing of it stays on the device."""
        self._planned.pop(plan.graph, None)

    def forget(self) -> None:
        """Drop the graphs planned so far: they are about to be captured anew. What code needed is still known."""
        for each in (self._planned, self.agreed, self._forms):
            each.clear()

    def remember(self) -> PlannerSnapshot:
        """Return what it takes to come back to this point, which later plans do not change."""
        return PlannerSnapshot(
            self.costs, self.agreed, self._planned, self._overheads, self._too_large
        ).copied()

    def restore(self, snapshot: PlannerSnapshot) -> None:
        """Come back to a point: ranks that do so plan alike, whatever they planned since."""
        self.costs, self.agreed, self._planned, self._overheads, self._too_large = snapshot.copied()
        self._forms.clear()

    def measure(self) -> int:
        """Measure operators of the known graphs, one at a time; return how many were new."""
        self._forms.clear()
        problems = [problem for problem, _ in self._with_problems()]
        return self.costs.measure(node for problem in problems for node in problem.joint.nodes)

    def would_change(self) -> bool:
        """Say whether planning the known graphs by today's costs decides otherwise."""
        return any(
            self._made(problem, known.plan.graph, known.kept_before).choices != known.plan.choices
            for problem, known in self._with_problems()
        )

    def _with_problems(self) -> list[tuple[PlanningProblem, PlannedGraph]]:
        """Return the graphs that can be planned again, with what is to be planned."""
        graphs = self._planned.values()
        return [(known.problem, known) for known in graphs if known.problem is not None]
