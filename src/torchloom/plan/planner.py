"""From a joint graph and a budget to a plan for it."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field, replace

from torchloom.costs import CostTable
from torchloom.costs.store import table_to_json
from torchloom.errors import PlanError
from torchloom.graph import droppable, graph_digest
from torchloom.memory import Transit, WorkspaceTable
from torchloom.memory.joint import joint_model
from torchloom.plan.beyond import Beyond
from torchloom.plan.found import NOTICEABLE
from torchloom.plan.model import GraphPlan, Plan
from torchloom.plan.places import moved_to
from torchloom.plan.search import Fields, Search
from torchloom.plan.states import HostStates, StateCosts
from torchloom.plan.task import Beside, Flight, Task


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
        transit: what collectives hold until they are waited for; None where nothing is sent.
        micro_steps: forwards and backwards per optimizer step, which a resident weight is gathered
            once for.
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
    agreed: dict[str, GraphPlan] = field(default_factory=dict)
    """By kind: what graphs of it follow as long as it fits."""
    _known: dict[str, _Known] = field(default_factory=dict)
    """By digest, in the order in which graphs were planned first."""
    _beyond: dict[str, Beyond] = field(default_factory=dict)
    """By graph; those whose code is known."""
    _fields: Fields = field(default_factory=Fields)
    _too_large: set[tuple[object, ...]] = field(default_factory=set)
    """By graph and choices: plans whose code does not fit."""

    @property
    def key(self) -> str:
        """Text of all that choices depend on, for cache keys."""
        offsets = sorted((digest, each.key) for digest, each in self._beyond.items())
        # A plan that was read back has its residents in another order than when it was made.
        others = [
            (name, sorted(known.plan.resident.items()), sorted(known.plan.pieces.items()))
            for name, known in self._known.items()
        ]
        agreed = sorted((kind, plan.digest) for kind, plan in self.agreed.items())
        return f"{self.common_key} {offsets} {others} {agreed}"

    @property
    def common_key(self) -> str:
        """The part that graphs planned so far do not change: ranks may have captured others."""
        costs = hashlib.blake2b(table_to_json(self.costs).encode(), digest_size=8).hexdigest()
        pinned = None if self.pinned is None else self.pinned.digest
        kept = f"{self.budget_bytes} {self.states}"
        return f"{kept} {self.micro_steps} {costs} {pinned} {self.prefetch_is_bound}"

    def learn(self, plan: GraphPlan) -> None:
        """Take the difference between a graph and its code into account from now on.

        Args:
            plan: one of this planner's, with the peak of the code that came out.
        """
        self._beyond.setdefault(plan.graph, Beyond()).learn(plan)
        if not plan.fits:
            self._too_large.add((plan.graph, *plan.choices))

    def has_another(self, plan: GraphPlan) -> bool:
        """Say whether, by what was learnt, another plan than those tried may be noticeably better."""
        added_us = plan.extra_us + plan.copy_us + plan.states_us
        if plan.fits and added_us <= NOTICEABLE * plan.compute_us:
            return False
        known = self._known.get(plan.graph)
        if known is None or known.task is None:
            return False
        beyond = self._beyond.get(plan.graph, Beyond())
        return not beyond.has(self._make(known.task, known.given))

    def plan(self, task: Task) -> GraphPlan:
        """Plan one joint graph.

        Raises:
            PlanError: no plan fits (the text holds the least that is possible), or the pinned plan
                is for other graphs.
        """
        digest = graph_digest(task.joint)
        given = self._given(digest)
        known = self._known.get(digest)
        if known is not None and known.task is not None and known.task.is_like(task):
            task = known.task  # captured once more: what was tried need not be tried again
        made = (
            self._make(task, given)
            if self.pinned is None
            else self._follow(self.pinned, digest, task, given)
        )
        self._known[digest] = _Known(task, made, given)
        return made

    def refusal(self, graph_budget_bytes: int, least: int) -> str:
        """Return the message for a graph that needs at least so many bytes."""
        lacking = least - graph_budget_bytes
        asked = (self.budget_bytes or 0) + self.base_bytes
        return (
            f"infeasible: forward and backward may add {graph_budget_bytes:,} bytes, the minimum is "
            f"{least:,}. Raise compile.memory_budget by at least {lacking:,} bytes, to "
            f"{asked + lacking:,}, or make the batch smaller"
        )

    def settle(self, plan: GraphPlan) -> None:
        """Reckon with a plan that runs: the best of several, or one that came with cached code."""
        known = self._known.get(plan.graph)
        if known is None:
            known = _Known(None, plan, self._given(plan.graph))
        self._known[plan.graph] = replace(known, plan=plan)

    @property
    def num_known(self) -> int:
        """How many graphs were planned since the last `forget`."""
        return sum(known.task is not None for known in self._known.values())

    def forget(self) -> None:
        """Drop the graphs planned so far: they are about to be captured anew."""
        self._known.clear()
        self._fields.clear()
        self.agreed.clear()

    def remember(self) -> Remembered:
        """Return what it takes to come back to this point."""
        return Remembered(
            self.costs,
            dict(self.agreed),
            dict(self._known),
            copy.deepcopy(self._beyond),
            frozenset(self._too_large),
        )

    def restore(self, remembered: Remembered) -> None:
        """Come back to a point: ranks that do so plan alike, whatever they planned since."""
        self.costs = remembered.costs
        self.agreed, self._known = dict(remembered.agreed), dict(remembered.known)
        self._beyond = copy.deepcopy(remembered.beyond)
        self._too_large = set(remembered.too_large)
        self._fields.clear()

    def measure(self) -> int:
        """Measure operators of the known graphs, one at a time; return how many were new."""
        self._fields.clear()
        tasks = [known.task for known in self._known.values() if known.task is not None]
        return self.costs.measure(node for task in tasks for node in task.joint.nodes)

    def would_change(self) -> bool:
        """Say whether planning the known graphs by today's costs decides otherwise."""
        return any(
            self._make(known.task, known.given).choices != known.plan.choices
            for known in self._known.values()
            if known.task is not None
        )

    def _given(self, digest: str) -> Beside:
        """Return what lives on because of other graphs."""
        found = Beside()
        for other, known in self._known.items():
            if other == digest:
                break  # those planned later have seen what this one keeps
            found = found.joined(Beside(known.plan.resident, known.plan.pieces))
        return found

    def _room(self, digest: str) -> int | None:
        """Return the bytes that the peaks of other graphs leave beside them; None: no bound."""
        if self.budget_bytes is None:
            return None
        plans = [known.plan for other, known in self._known.items() if other != digest]
        highest = max((plan.batch_bytes + plan.peak_bytes for plan in plans), default=0)
        return self.budget_bytes - highest

    def _make(self, task: Task, given: Beside) -> GraphPlan:
        digest = graph_digest(task.joint)
        agreed = self._as_agreed(task, digest, given)
        if agreed is not None:
            return agreed
        budget, room, beyond = (
            self._budget_of(task),
            self._room(digest),
            self._beyond.get(digest, Beyond()),
        )
        states = None
        if self.states is not None and budget is not None:
            states = StateCosts(self.states, self.costs.device, self.micro_steps, room)
        search = Search(
            costs=self.costs,
            workspaces=self.workspaces,
            budget_bytes=budget,
            beyond=beyond,
            given=given,
            room_beside=room,
            fields=self._fields,
            micro_steps=self.micro_steps,
            states=states,
        )
        plan = search.run(task, digest)
        if not plan.fits and not self.is_estimate:
            raise PlanError(self.refusal(budget or 0, plan.peak_bytes + plan.beside_bytes))
        lacking = plan.peak_bytes + beyond.bytes_of(plan.offload) - (plan.budget_bytes or 0)
        if budget is not None and lacking > 0 and beyond.has(plan):
            # The smallest plan is known not to fit. Compilers fuse best what is computed once.
            plain = search.plain(task, digest)
            return plan if beyond.has(plain) else plain
        return plan

    def _as_agreed(self, task: Task, digest: str, given: Beside) -> GraphPlan | None:
        """Return the plan that graphs of this kind follow; None where there is none that fits."""
        wanted = self.agreed.get(task.kind)
        if wanted is None or wanted.graph == digest:
            return None
        try:
            wanted = replace(moved_to(wanted, task.joint), graph=digest)
            plan = self._obey(wanted, task, given)
        except PlanError:
            return None
        return None if (digest, *plan.choices) in self._too_large else plan

    def _follow(self, pinned: Plan, digest: str, task: Task, given: Beside) -> GraphPlan:
        wanted = next((each for each in pinned.graphs if each.graph == digest), None)
        if wanted is None:
            raise PlanError(
                f"the pinned plan holds no graph {digest} (it has "
                f"{', '.join(each.graph for each in pinned.graphs) or 'none'}): model, batch shape, "
                "passes or torch have changed since; plan again, without compile.plan"
            )
        return self._obey(wanted, task, given)

    def _obey(self, wanted: GraphPlan, task: Task, given: Beside) -> GraphPlan:
        """Return a plan with figures for this graph.

        Raises:
            PlanError: it decides about what this graph does not have, or does not fit.
        """
        digest = wanted.graph
        if wanted.offload:
            if task.swap is None:
                raise PlanError(
                    f"the pinned plan moves {sorted(wanted.offload)[0]!r} of graph {digest} to host "
                    "memory: set compile.offload_activation, or plan again"
                )
            task = task.swap(wanted.offload, wanted.again)
        unknown = sorted(wanted.resident.keys() - task.weights.keys() - given.weights.keys())
        if unknown:
            raise PlanError(
                f"the pinned plan keeps {unknown[0]!r} gathered in graph {digest}, which cannot be: "
                "it is no sharded parameter of this graph, or selective_gather is off"
            )
        unknown = sorted(wanted.pieces.keys() - task.pieces.keys() - given.pieces.keys())
        if unknown:
            raise PlanError(
                f"the pinned plan keeps the piece of {unknown[0]!r} on the device in graph {digest}, "
                "but it does not wait on the host: set compile.offload_parameters, or plan again"
            )
        self.workspaces.probe(task.joint.nodes)
        model = joint_model(task.joint, task.num_results, self.workspaces)
        allowed = {node.name for node in droppable(task.joint)}
        unknown = sorted(wanted.recompute - allowed)
        if unknown:
            raise PlanError(
                f"the pinned plan computes {unknown[0]!r} again in graph {digest}, which cannot be: "
                "it is an input, has side effects, or is not in forward"
            )
        peaks = model.simulate(lambda i: model.nodes[i].name in wanted.recompute)
        beside = given.joined(Beside(wanted.resident, wanted.pieces))
        trial = beside.trial(wanted.recompute, Flight(wanted.bucket_bytes, wanted.prefetch_bytes))
        peak_bytes = peaks.peak_bytes if task.verify is None else task.verify(trial).peak_bytes
        budget = self._budget_of(task)
        if budget is not None:
            budget -= beside.num_bytes
            expected = peak_bytes
            if self.is_estimate:
                expected += wanted.peak_bytes - wanted.graph_peak_bytes
            if expected > budget:
                raise PlanError(
                    f"the pinned plan of graph {digest} adds {expected:,} bytes, "
                    f"{budget:,} are left by compile.memory_budget: raise it, or plan again"
                )
        return replace(
            wanted,
            peak_bytes=peak_bytes,
            graph_peak_bytes=peak_bytes,
            saved_bytes=peaks.saved_bytes,
            budget_bytes=budget,
            batch_bytes=task.batch_bytes,
            resident=beside.weights,
            pieces=beside.pieces,
        )

    def _budget_of(self, task: Task) -> int | None:
        return None if self.budget_bytes is None else self.budget_bytes - task.batch_bytes


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a planner knew at some point."""

    costs: CostTable
    agreed: dict[str, GraphPlan]
    known: dict[str, _Known]
    beyond: dict[str, Beyond]
    too_large: frozenset[tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class _Known:
    """A graph that was planned."""

    task: Task | None
    """None where its code came from a cache."""
    plan: GraphPlan
    given: Beside
    """What lives on because of graphs before it."""
