"""Following a plan instead of making one: a pinned plan, or the plan that other ranks follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchloom.errors import PlanError
from torchloom.graph import droppable
from torchloom.memory import WorkspaceTable
from torchloom.memory.joint import Peaks, joint_model
from torchloom.plan.matching import moved_to
from torchloom.plan.model import GraphPlan, Plan
from torchloom.plan.problem import KeptOnDevice, PlanningProblem, TransferSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Follower:
    """Applies a plan to a graph: checks that it can be followed, and computes its figures anew.

    Args:
        budget_bytes: for forward, backward and what stays on the device; None for no bound.
        kept_before: what stays on the device because of graphs planned before.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        is_estimate: whether the compiler allocates in its own way: the plan's difference between
            graphs and code then counts.
    """

    budget_bytes: int | None
    kept_before: KeptOnDevice
    workspaces: WorkspaceTable
    is_estimate: bool

    def follow_pinned(self, pinned: Plan, digest: str, problem: PlanningProblem) -> GraphPlan:
        """Return the part of a pinned plan that is for a graph.

        Args:
            pinned: the plan of a whole run.
            digest: of the graph.
            problem: what may be decided about it.

        Raises:
            PlanError: there is none, it decides about what this graph does not have, or it does not
                fit.
        """
        wanted = next((each for each in pinned.graphs if each.graph == digest), None)
        if wanted is None:
            raise PlanError(
                f"the pinned plan holds no graph {digest} (it has "
                f"{', '.join(each.graph for each in pinned.graphs) or 'none'}): model, batch shape, "
                "passes or torch have changed since; plan again, without compile.plan"
            )
        return self.follow(wanted, problem)

    def follow_agreed(
        self, agreed: GraphPlan, digest: str, problem: PlanningProblem
    ) -> GraphPlan | None:
        """Return the plan of a graph with other sizes, for this one; None where it does not fit.

        Args:
            agreed: the plan of a graph of the same operators.
            digest: of this graph.
            problem: what may be decided about it.
        """
        try:
            return self.follow(replace(moved_to(agreed, problem.joint), graph=digest), problem)
        except PlanError:
            return None

    def follow(self, wanted: GraphPlan, problem: PlanningProblem) -> GraphPlan:
        """Return a plan with its figures for this graph.

        Args:
            wanted: what is decided.
            problem: what may be decided.

        Raises:
            PlanError: it decides about what this graph does not have, or does not fit.
        """
        if wanted.offload:
            problem = _offloaded(wanted, problem)
        self._check_kept(wanted, problem)
        peaks = self._peaks(wanted, problem)
        kept = self.kept_before.joined(KeptOnDevice(wanted.resident, wanted.pieces))
        transfers = TransferSizes(wanted.bucket_bytes, wanted.prefetch_bytes)
        candidate = kept.candidate(wanted.recompute, transfers)
        peak_bytes = (
            peaks.peak_bytes
            if problem.run_trial is None
            else problem.run_trial(candidate).peak_bytes
        )
        budget_bytes = None
        if self.budget_bytes is not None:
            budget_bytes = self.budget_bytes - kept.num_bytes
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
        known, before = f"graph {wanted.graph}", self.kept_before
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


def _offloaded(wanted: GraphPlan, problem: PlanningProblem) -> PlanningProblem:
    if problem.offload is None:
        raise PlanError(
            f"the pinned plan moves {sorted(wanted.offload)[0]!r} of graph {wanted.graph} to host "
            "memory: set compile.offload_activation, or plan again"
        )
    return problem.offload(wanted.offload, wanted.again)


def _first_unknown(names: Iterable[str], *known: Iterable[str]) -> str | None:
    return min(set(names).difference(*known), default=None)
