"""Following a plan instead of making one: a pinned plan, or the plan that other ranks follow.

A value of one graph is found in another of the same operators with other sizes by its place among the calls of its
operator. Names of nodes will not do: where sizes are symbols, what computes sizes takes names as well, and the `add`
of one graph is the `add_1` of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from torchloom.errors import PlanError, RegionError
from torchloom.graph import droppable, tensors_in, value_of
from torchloom.memory import WorkspaceTable
from torchloom.memory.joint import Peaks, joint_model
from torchloom.plan.model import GraphPlan, Plan
from torchloom.plan.problem import KeptOnDevice, PlanLimits, PlanningProblem
from torchloom.plan.transfer_sizes import TransferSizes


def followed(
    given: Plan | GraphPlan | None,
    problem: PlanningProblem,
    digest: str,
    limits: PlanLimits,
    workspaces: WorkspaceTable,
    *,
    is_estimate: bool,
) -> GraphPlan | None:
    """Return the plan that was given for a graph, with figures computed anew; None where there is none.

    Args:
        given: the pinned plan of a whole run, or the plan of a graph of the same operators with other sizes.
        problem: the graph, and what may be decided about it.
        digest: of the graph.
        limits: what plans of the graph may take.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        is_estimate: whether the compiler allocates in its own way: the plan's difference between
            graphs and code then counts.

    Raises:
        PlanError: the plan lacks this graph, decides about what it does not have, or does not fit.
        RegionError: the graph calls bodies, and the plan is for the whole graph.
    """
    if isinstance(given, Plan):
        wanted: GraphPlan | None = _pinned(given, problem, digest)
    else:
        wanted = _agreed(given, problem, digest)
    if wanted is None:
        return None
    if wanted.offload:
        if problem.offload is None:
            raise PlanError(
                f"the pinned plan moves {min(wanted.offload)!r} of graph {wanted.graph} to host "
                "memory: set compile.offload_activation, or plan again"
            )
        problem = problem.offload(wanted.offload, wanted.again)
    _check_kept(wanted, problem, limits.kept_before)
    peaks = _peaks(wanted, problem, workspaces)
    kept = limits.kept_before.joined(KeptOnDevice(wanted.resident, wanted.pieces))
    transfers = TransferSizes(wanted.bucket_bytes, wanted.prefetch_bytes)
    peak_bytes = peaks.peak_bytes
    if problem.run_trial is not None:
        peak_bytes = problem.run_trial(kept.candidate(wanted.recompute, transfers)).peak_bytes
    budget_bytes = limits.budget_bytes
    if budget_bytes is not None:
        budget_bytes -= kept.num_bytes
        code_bytes = wanted.peak_bytes - wanted.graph_peak_bytes if is_estimate else 0
        if peak_bytes + code_bytes > budget_bytes:
            raise PlanError(
                f"the pinned plan of graph {digest} adds {peak_bytes + code_bytes:,} bytes, "
                f"{budget_bytes:,} are left by compile.memory_budget: raise it, or plan again"
            )
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


def _pinned(pinned: Plan, problem: PlanningProblem, digest: str) -> GraphPlan:
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


def _agreed(agreed: GraphPlan | None, problem: PlanningProblem, digest: str) -> GraphPlan | None:
    if agreed is None or agreed.graph == digest:
        return None
    if problem.parts and not agreed.calls_bodies:
        raise RegionError("the plan that ranks share is for the whole graph")
    if agreed.calls_bodies and not problem.parts:
        raise PlanError("the plan that ranks share is for a graph that calls bodies")
    return replace(_moved(agreed, problem.joint), graph=digest)


def _moved(plan: GraphPlan, graph: fx.Graph) -> GraphPlan:
    """Return a plan with the names that its values have in another graph."""
    names = {place: name for name, place in places_of(graph).items()}
    known: dict[str, str] = {}
    for each in plan.decisions:
        name = names.get((each.op, each.place))
        if name is None:
            raise PlanError(f"the graph makes no value like {each.value!r} of the plan")
        known[each.value] = name
    if lacking := sorted(plan.again - known.keys()):
        raise PlanError(f"the plan does not say which value is {lacking[0]!r}")
    return replace(
        plan,
        decisions=tuple(replace(each, value=known[each.value]) for each in plan.decisions),
        again=frozenset(known[name] for name in plan.again),
    )


def places_of(graph: fx.Graph) -> dict[str, tuple[str, int]]:
    """Return by name which call of which operator makes a tensor or several, counted from 0."""
    num_calls, found = Counter[str](), dict[str, tuple[str, int]]()
    for node in graph.nodes:
        if node.op == "call_function" and any(True for _ in tensors_in(value_of(node))):
            op = op_of(node)
            found[node.name] = op, num_calls[op]
            num_calls[op] += 1
    return found


def op_of(node: fx.Node) -> str:
    """Return how plans call the operator of a node."""
    return str(node.target).removeprefix("aten.")


def _check_kept(wanted: GraphPlan, problem: PlanningProblem, before: KeptOnDevice) -> None:
    name = _first_unknown(wanted.resident, problem.weight_bytes, before.weight_bytes)
    if name is not None:
        raise PlanError(
            f"the pinned plan keeps {name!r} gathered in graph {wanted.graph}, which cannot be: "
            "it is no sharded parameter of this graph, or selective_gather is off"
        )
    name = _first_unknown(wanted.pieces, problem.shard_bytes, before.shard_bytes)
    if name is not None:
        raise PlanError(
            f"the pinned plan keeps the shard of {name!r} on the device in graph {wanted.graph}, "
            "but it does not wait on the host: set compile.offload_parameters, or plan again"
        )


def _peaks(wanted: GraphPlan, problem: PlanningProblem, workspaces: WorkspaceTable) -> Peaks:
    workspaces.probe(problem.joint.nodes)
    model = joint_model(problem.joint, problem.num_results, workspaces)
    name = _first_unknown(wanted.recompute, (node.name for node in droppable(problem.joint)))
    if name is not None:
        raise PlanError(
            f"the pinned plan computes {name!r} again in graph {wanted.graph}, which cannot be: "
            "it is an input, has side effects, or is not in forward"
        )
    recompute = wanted.recompute
    return model.simulate(lambda i: model.nodes[i].name in recompute)


def _first_unknown(names: Iterable[str], *known: Iterable[str]) -> str | None:
    return min(set(names).difference(*known), default=None)
