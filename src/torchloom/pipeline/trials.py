"""Try a plan's candidates: run the passes for each on copies of the graph and simulate the result.

Passes that run after the split (placing, bucketing, prefetching, copies) move nodes. So the simulation
reads copies of the split graphs after those passes, which are the graphs that would run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from torchloom._torch.aot import sketching
from torchloom.backends.graphs import copy_graph_module
from torchloom.capture import partition_by_tags
from torchloom.capture.calls import keep_calls
from torchloom.capture.hooks import Bodies, GraphKind
from torchloom.capture.recomputing import recompute_in_calls
from torchloom.costs.timeline import timeline
from torchloom.graph import Choices, GraphPass, GraphSplit, KnownValues, PassContext
from torchloom.memory import expanded_joint, micro_step
from torchloom.ops.regions import halves_called, known_bodies
from torchloom.passes import PASSES
from torchloom.passes.offload_activation import offload_named
from torchloom.pipeline.activation_transfers import (
    configured_sizes,
    keep_shards,
    option_of,
    reloaded_bytes,
    traffic_of,
    transfers_to_try,
)
from torchloom.pipeline.manager import PassManager
from torchloom.pipeline.report import GraphReport
from torchloom.plan import PlanCandidate, Planner, PlanningProblem, TrialResult

Lower = Callable[[fx.GraphModule, GraphKind, Choices], None]
"""Runs the lowered passes over a graph: `(gm, "forward" or "backward", what was chosen)`."""

OFFLOAD, SELECTIVE = "offload_activation", "selective_gather"
"""Passes that carry out a plan's choices."""
_MOST_NODES = 20_000
"""Nodes of all remembered splits together; they take about 60 MB."""


@dataclass(kw_only=True)
class GraphTrials:
    """Describes the planning problem of one joint graph and tries candidates on copies of it.

    Args:
        planner: gives costs and workspaces.
        context: what passes may know.
        lower: the passes behind the split.
        report: of the graph; says what kind it is.
        passes: those that run, by name: what a plan may decide about, within their options.
        joint_inputs: values of the graph's inputs.
        num_results: how many of its outputs are forward's.
        static_inputs: indices of inputs that live on between steps.
        bodies: that the graph's calls may name; extended.
    """

    planner: Planner
    context: PassContext
    lower: Lower
    report: GraphReport
    passes: Mapping[str, GraphPass]
    joint_inputs: Any
    num_results: int
    static_inputs: Sequence[int] | None
    bodies: Bodies = field(default_factory=dict)
    _known: KnownValues = field(default_factory=KnownValues)
    _inside: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By the names of values within calls of bodies: which call, and their names in the body."""
    _splits: dict[Any, Sequence[fx.GraphModule]] = field(default_factory=dict)

    def problem(self, joint: fx.GraphModule, *, may_offload: bool = True) -> PlanningProblem:
        """Return the planning problem of a joint graph; the graph is not changed.

        Args:
            joint: the graph.
            may_offload: whether a plan may let activations wait on the host.
        """

        whole = expanded_joint(joint.graph)
        self._inside = {
            node.name: (part.call, name)
            for part in whole.parts
            for node, name in part.names.items()
        }

        def offload(names: frozenset[str], recompute: frozenset[str]) -> PlanningProblem:
            copy = copy_graph_module(joint, is_sketch=True)
            self.offload(copy, names, recompute)
            return self.problem(copy, may_offload=False)

        sizes = configured_sizes(self.passes)
        traffic = traffic_of(joint, self.context, sizes)
        may_stay = traffic.gathers if SELECTIVE in self.passes else {}
        return PlanningProblem(
            joint=whole.graph,
            parts=whole.parts,
            num_results=self.num_results,
            run_trial=lambda candidate: self._run(joint, candidate),
            batch_bytes=self.report.batch_bytes,
            weight_bytes={name: each.num_bytes for name, each in may_stay.items()},
            shard_bytes=reloaded_bytes(joint),
            kind=self.report.kind,
            traffic=traffic,
            transfers=transfers_to_try(
                traffic, sizes, self.passes, is_bound=self.planner.prefetch_is_bound
            ),
            offload=offload if may_offload and OFFLOAD in self.passes else None,
            offload_min_bytes=option_of(self.passes, OFFLOAD, "min_bytes"),
        )

    def offload(
        self, joint: fx.GraphModule, names: frozenset[str], recompute: frozenset[str]
    ) -> None:
        """Offload values to host memory between forward and backward.

        Args:
            joint: the graph, which is edited.
            names: the values.
            recompute: values that backward computes again, from the reloaded ones.
        """
        copy = copy_graph_module(joint, is_sketch=True)
        forward, backward = self.split(copy, recompute, is_final=False)
        inputs = {node.name for node in backward.graph.find_nodes(op="placeholder")}
        split = GraphSplit(
            forward=_computed(forward.graph),
            backward=_computed(backward.graph),
            saved=frozenset(name for name in inputs if not name.startswith("tangents")),
            num_outputs=self.num_results,
        )
        offload_named(joint, names, split, pin=option_of(self.passes, OFFLOAD, "pin_memory"))
        joint.graph.lint()
        joint.recompile()

    def split(
        self,
        gm: fx.GraphModule,
        names: frozenset[str],
        *,
        is_final: bool,
        is_clean: bool = False,
    ) -> Any:
        """Return forward and backward when backward computes the named values again.

        Args:
            gm: the joint graph, which is tagged.
            names: values that backward computes again.
            is_final: whether this split is compiled; else it is a trial's.
            is_clean: whether the graph has no dead or repeated nodes.
        """
        in_calls: dict[int, set[str]] = {}
        for name in names & self._inside.keys():
            call, own = self._inside[name]
            in_calls.setdefault(call, set()).add(own)
        recompute_in_calls(
            gm.graph, {call: frozenset(own) for call, own in in_calls.items()}, self.bodies
        )
        keep_calls(gm.graph)
        known = self.context.choices or Choices()
        choices = dataclasses.replace(known, recompute=names - self._inside.keys())
        context = dataclasses.replace(self.context, choices=choices)
        manager = PassManager([PASSES["recompute"]], context, is_trial=not is_final)
        report = self.report if is_final else GraphReport(self.report.name, 0, "", "")
        manager.run(gm, context, f"{self.report.name}.joint", report)
        return partition_by_tags(
            gm,
            self.joint_inputs,
            num_fwd_outputs=self.num_results,
            static_lifetime_input_indices=self.static_inputs,
            is_clean=is_clean,
        )

    def forget(self) -> None:
        """Drop everything that was cached to make trials faster."""
        self._known = KnownValues()
        self._splits.clear()

    def _run(self, joint: fx.GraphModule, candidate: PlanCandidate) -> TrialResult:
        with known_bodies(self.bodies), self._known.trial(), sketching():
            return self._result(joint, candidate)

    def _result(self, joint: fx.GraphModule, candidate: PlanCandidate) -> TrialResult:
        forward, backward = self._halves(joint, candidate)
        known = self.context.choices or Choices()
        sizes = candidate.transfers._asdict()
        choices = dataclasses.replace(known, resident=candidate.resident, **sizes)
        self.lower(forward, "forward", choices)
        self.lower(backward, "backward", choices)
        planner, graphs = self.planner, (forward.graph, backward.graph)
        planner.workspaces.probe(
            node for graph in (*graphs, *halves_called(graphs)) for node in graph.nodes
        )
        times = timeline(
            graphs,
            planner.costs,
            self.context.world_size,
            gathers_per_use=1 / planner.micro_steps,
            bucket_bytes=option_of(self.passes, "bucket", "gather_bytes"),
        )
        step = micro_step(*graphs, probe=planner.workspaces, transit=planner.transit)
        return TrialResult(step.peak_bytes, times.overhead_us, times.copy_us)

    def _halves(self, joint: fx.GraphModule, candidate: PlanCandidate) -> list[fx.GraphModule]:
        """Return forward and backward of a candidate, before any pass runs over them.

        A search by halving asks for the same few splits many times, with different resident weights.
        """
        key = joint.graph, candidate.shards, candidate.recompute
        if key not in self._splits:
            copy = copy_graph_module(joint, is_sketch=True)
            keep_shards(copy, candidate.shards)
            self._splits[key] = self.split(
                copy,
                candidate.recompute,
                is_final=False,
                is_clean=not candidate.shards and OFFLOAD not in self.passes,
            )
        halves = self._splits[key] = self._splits.pop(key)  # moves it to the end: dropped last
        while _num_nodes(self._splits.values()) > _MOST_NODES:
            del self._splits[next(iter(self._splits))]
        return [copy_graph_module(half, is_sketch=True) for half in halves]


def _num_nodes(splits: Iterable[Sequence[fx.GraphModule]]) -> int:
    return sum(len(half.graph.nodes) for halves in splits for half in halves)


def _computed(graph: fx.Graph) -> frozenset[str]:
    return frozenset(node.name for node in graph.nodes if node.op == "call_function")
