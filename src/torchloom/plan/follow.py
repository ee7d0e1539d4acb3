"""Following a plan instead of making one: a pinned plan, or the plan that other ranks follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchloom.errors import PlanError, RegionError
from torchloom.graph import droppable
from torchloom.memory import WorkspaceTable
from torchloom.memory.joint import Peaks, joint_model
from torchloom.plan.limits import PlanLimits
from torchloom.plan.matching import moved_to
from torchloom.plan.model import GraphPlan, Plan
from torchloom.plan.problem import KeptOnDevice, PlanningProblem, TransferSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Follower:
    """Applies a plan to a graph: checks that it can be followed, and computes its figures anew.

    Args:
        limits: what plans of the graph may take.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        is_estimate: whether the compiler allocates in its own way: the plan's difference between
            graphs and code then counts.
    """

    limits: PlanLimits
    workspaces: WorkspaceTable
    is_estimate: bool

    def given(
        self, problem: PlanningProblem, digest: str, pinned: Plan | None, agreed: GraphPlan | None
    ) -> GraphPlan | None:
        """Return the plan that was given for a graph, with its figures; None where there is none.

        Args:
            problem: the graph, and what may be decided about it.
            digest: of the graph.
            pinned: the plan of a whole run, which is followed or refused.
            agreed: the plan of a graph of the same operators with other sizes, followed if it fits.

        Raises:
            PlanError: the pinned plan lacks this graph, decides about what it does not have, or
                does not fit.
            RegionError: the graph calls bodies, and the plan is for the whole graph.
        """
        try:
            wanted = _wanted(problem, digest, pinned, agreed)
            return None if wanted is None else self._followed(wanted, problem)
        except PlanError:
            if pinned is not None:
                raise
            return None

    def _followed(self, wanted: GraphPlan, problem: PlanningProblem) -> GraphPlan:
        if wanted.offload:
            problem = _offloaded(wanted, problem)
        self._check_kept(wanted, problem)
        peaks = self._peaks(wanted, problem)
        own = KeptOnDevice(wanted.resident, wanted.pieces)
        kept = self.limits.kept_before.joined(own)
        transfers = TransferSizes(wanted.bucket_bytes, wanted.prefetch_bytes)
        peak_bytes = peaks.peak_bytes
        if problem.run_trial is not None:
            peak_bytes = problem.run_trial(kept.candidate(wanted.recompute, transfers)).peak_bytes
        budget_bytes = self.limits.budget_bytes
        if budget_bytes is not None:
            budget_bytes -= kept.num_bytes
            self._check_fits(wanted, peak_bytes, budget_bytes)
        return replace(
            wanted,
            peak_bytes=peak_bytes,
            graph_peak_bytes=peak_bytes,
            saved_bytes=peaks.saved_bytes,
            budget_bytes=budget_bytes,
            batch_bytes=problem.batch_bytes,
            resident=kept.weight_bytes,
            pieces=kept.shard_bytes,
        )

    def _check_kept(self, wanted: GraphPlan, problem: PlanningProblem) -> None:
        known, before = f"graph {wanted.graph}", self.limits.kept_before
        name = _first_unknown(wanted.resident, problem.weight_bytes, before.weight_bytes)
        if name is not None:
            raise PlanError(
                f"the pinned plan keeps {name!r} gathered in {known}, which cannot be: "
                "it is no sharded parameter of this graph, or selective_gather is off"
            )
        name = _first_unknown(wanted.pieces, problem.shard_bytes, before.shard_bytes)
        if name is not None:
            raise PlanError(
                f"the pinned plan keeps the shard of {name!r} on the device in {known}, "
                "but it does not wait on the host: set compile.offload_parameters, or plan again"
            )

    def _peaks(self, wanted: GraphPlan, problem: PlanningProblem) -> Peaks:
        self.workspaces.probe(problem.joint.nodes)
        model = joint_model(problem.joint, problem.num_results, self.workspaces)
        may_drop = {node.name for node in droppable(problem.joint)}
        name = _first_unknown(wanted.recompute, may_drop)
        if name is not None:
            raise PlanError(
                f"the pinned plan computes {name!r} again in graph {wanted.graph}, which cannot be: "
                "it is an input, has side effects, or is not in forward"
            )
        recompute = wanted.recompute
        return model.simulate(lambda i: model.nodes[i].name in recompute)

    def _check_fits(self, wanted: GraphPlan, peak_bytes: int, budget_bytes: int) -> None:
        expected_bytes = peak_bytes
        if self.is_estimate:
            expected_bytes += wanted.peak_bytes - wanted.graph_peak_bytes
        if expected_bytes > budget_bytes:
            raise PlanError(
                f"the pinned plan of graph {wanted.graph} adds {expected_bytes:,} bytes, "
                f"{budget_bytes:,} are left by compile.memory_budget: raise it, or plan again"
            )


def _wanted(
    problem: PlanningProblem, digest: str, pinned: Plan | None, agreed: GraphPlan | None
) -> GraphPlan | None:
    if pinned is not None:
        for each in pinned.graphs:
            if each.graph == digest:
                return each
        if problem.parts and not all(each.calls_bodies for each in pinned.graphs):
            raise RegionError("the pinned plan is for the whole graph")
        raise PlanError(
            f"the pinned plan holds no graph {digest} (it has "
            f"{', '.join(each.graph for each in pinned.graphs) or 'none'}): model, batch shape, "
            "passes, compile.regions or torch have changed since; plan again, without compile.plan"
        )
    if agreed is None or agreed.graph == digest:
        return None
    if problem.parts and not agreed.calls_bodies:
        raise RegionError("the plan that ranks share is for the whole graph")
    if agreed.calls_bodies and not problem.parts:
        raise PlanError("the plan that ranks share is for a graph that calls bodies")
    return replace(moved_to(agreed, problem.joint), graph=digest)


def _offloaded(wanted: GraphPlan, problem: PlanningProblem) -> PlanningProblem:
    if problem.offload is None:
        raise PlanError(
            f"the pinned plan moves {sorted(wanted.offload)[0]!r} of graph {wanted.graph} to host "
            "memory: set compile.offload_activation, or plan again"
        )
    return problem.offload(wanted.offload, wanted.again)


def _first_unknown(names: Iterable[str], *known: Iterable[str]) -> str | None:
    return min(set(names).difference(*known), default=None)
