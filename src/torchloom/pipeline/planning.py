"""The partitioner that plans: it asks for a plan of a joint graph, tries candidates on copies, and splits by the plan.

Passes that run after the split (placing, bucketing, prefetching, copies) move nodes. So a trial simulates copies of
the split graphs as those passes leave them, which are the graphs that would run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from torchloom._torch import aot as torch_partition
from torchloom._torch.aot import copy_graph_module, sketching
from torchloom._torch.tensors import size_hint
from torchloom.capture import partition_by_tags
from torchloom.capture.calls import keep_calls
from torchloom.capture.hooks import Bodies, GraphKind
from torchloom.capture.partition import recompute_in_calls
from torchloom.costs.timeline import timeline
from torchloom.graph import (
    Choices,
    GraphPass,
    KnownValues,
    PassContext,
    args_of,
    find,
    split_between,
    value_of,
)
from torchloom.memory import (
    expanded_joint,
    micro_step,
)
from torchloom.ops.losses import ROWS_ARG, chunked_loss
from torchloom.ops.regions import halves_called, known_bodies
from torchloom.passes import PASSES
from torchloom.passes.offload_activation import offload_named
from torchloom.passes.offload_parameters import keep_shards, reloaded_bytes
from torchloom.pipeline.manager import PassManager
from torchloom.pipeline.registry import option_of
from torchloom.pipeline.report import GraphReport
from torchloom.plan import GraphPlan, PlanCandidate, Planner, PlanningProblem, TrialResult
from torchloom.plan.transfer_sizes import ConfiguredSizes, sizes_to_try, traffic_of

Lower = Callable[[fx.GraphModule, GraphKind, Choices], None]
"""Runs the lowered passes over a graph: `(gm, "forward" or "backward", what was chosen)`."""

OFFLOAD, SELECTIVE = "offload_activation", "selective_gather"
"""Passes that carry out a plan's choices."""
_MOST_HALVINGS = 20
_LEAST_ROWS = 64
"""Products of fewer rows wait for the weights that they read."""
_LOWER = 0.98
"""A halving that leaves more than this of the peak is not worth its chunks."""
_MOST_NODES = 20_000
"""Nodes of all remembered splits together; they take about 60 MB."""


@dataclass(eq=False)
class PlannedSplit:
    """Plans a joint graph and splits it by the plan.

    Args:
        planner: chooses a plan that keeps the memory budget.
        context: what passes may know.
        lower: the passes behind the split, for trials.
        report: of the graph; receives the plan.
        passes: those that run, by name; a plan decides only what they can carry out, within their options.
        tell_phase: told "plan", and "rest" when there is one.
        is_recorded: whether the code runs as CUDA graphs.
    """

    planner: Planner
    context: PassContext
    lower: Lower
    report: GraphReport
    passes: Mapping[str, GraphPass]
    tell_phase: Callable[[str], None] = lambda name: None
    is_recorded: bool = False
    _bodies: Bodies = field(default_factory=dict)
    """What the graph's calls may name."""
    _joint_inputs: Any = ()
    _num_results: int = 0
    _static_inputs: Sequence[int] | None = None
    fetched: frozenset[str] = frozenset()
    """Parameters of the split graph whose shards wait on the host."""
    _known: KnownValues = field(default_factory=KnownValues)
    _inside: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By the names of values within calls of bodies: which call, and their names in the body."""
    _splits: dict[Any, Sequence[fx.GraphModule]] = field(default_factory=dict)

    def __call__(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        bodies: Bodies,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph as the plan for it says.

        Args:
            joint: forward and backward in one graph.
            joint_inputs: values of its inputs.
            bodies: that its calls may name; extended.
            num_fwd_outputs: how many of its outputs are forward's.
            static_lifetime_input_indices: inputs that live on between steps.
        """
        joint = torch_partition.prepare_joint(joint)
        self._bodies, self._joint_inputs = bodies, joint_inputs
        self._num_results, self._static_inputs = num_fwd_outputs, static_lifetime_input_indices
        rows = self._fit_losses(joint)
        plan = self._plan(copy_graph_module(joint))  # trials write tags into it
        self.report.plan = plan = replace(plan, loss_rows=rows)
        if plan.offload:
            self._offload(joint, plan.offload, plan.again)
        self.fetched = frozenset(reloaded_bytes(joint)) - frozenset(plan.pieces)
        keep_shards(joint, plan.pieces)
        return self._split(joint, plan.recompute, is_final=True)

    def _plan(self, joint: fx.GraphModule) -> GraphPlan:
        started = time.perf_counter()
        self.tell_phase("plan")
        with _older_objects_left_alone():
            plan = self.planner.plan(self._problem(joint))
        self.report.planning_s += time.perf_counter() - started
        self.report.plan = plan
        self._known = KnownValues()
        self._splits.clear()
        self.tell_phase("rest")
        return plan

    def _fit_losses(self, joint: fx.GraphModule) -> tuple[int, ...]:
        """Let losses compute as few rows at a time as it takes to keep every other value; return how many each.

        Fewer rows take no longer until they are few, so they come before recomputation. Where the peak lies elsewhere
        or even few rows do not make a plan fit, the last halving that lowered the peak stands.
        """
        losses = find(joint.graph, chunked_loss)
        room_bytes, pinned = self.planner.room_bytes, self.planner.pinned
        all_rows = [size_hint(value_of(args_of(each)[0]).shape[0]) for each in losses]
        rows, before = tuple(args_of(each)[ROWS_ARG] for each in losses), None
        if not losses or (room_bytes is None and pinned is None):
            return rows
        known = () if pinned is None else [graph.loss_rows for graph in pinned.graphs]
        for halvings in range(_MOST_HALVINGS):
            tried = tuple(max(1, -(-each >> halvings)) for each in all_rows)
            if known and tried not in known:
                continue
            for each, number in zip(losses, tried, strict=True):
                each.update_arg(ROWS_ARG, number)
            if known or room_bytes is None:
                return tried
            copy = copy_graph_module(joint)
            peak_bytes = self._run(copy, PlanCandidate(frozenset())).peak_bytes
            if before is not None and peak_bytes > _LOWER * before:
                break
            rows, before = tried, peak_bytes
            if peak_bytes <= room_bytes - self.report.batch_bytes or max(tried) <= _LEAST_ROWS:
                break
        for each, number in zip(losses, rows, strict=True):
            each.update_arg(ROWS_ARG, number)
        return rows

    def _problem(self, joint: fx.GraphModule, *, may_offload: bool = True) -> PlanningProblem:
        """Return the planning problem of a joint graph, which is not changed."""
        whole = expanded_joint(joint.graph)
        self._inside = {
            node.name: (part.call, name)
            for part in whole.parts
            for node, name in part.names.items()
        }

        def offload(names: frozenset[str], recompute: frozenset[str]) -> PlanningProblem:
            copy = copy_graph_module(joint)
            self._offload(copy, names, recompute)
            return self._problem(copy, may_offload=False)

        sizes = ConfiguredSizes(
            self._option("bucket", "gather_bytes"),
            self._option("bucket", "reduce_bytes"),
            self._option("prefetch", "max_bytes"),
        )
        traffic = traffic_of(joint.graph, self.context, sizes)
        may_stay = traffic.gathers if SELECTIVE in self.passes and not self.is_recorded else {}
        return PlanningProblem(
            joint=whole.graph,
            parts=whole.parts,
            num_results=self._num_results,
            run_trial=lambda candidate: self._run(joint, candidate),
            batch_bytes=self.report.batch_bytes,
            weight_bytes={name: each.num_bytes for name, each in may_stay.items()},
            shard_bytes=reloaded_bytes(joint),
            kind=self.report.kind,
            traffic=traffic,
            transfers=sizes_to_try(
                traffic, sizes, self.passes, is_bound=self.planner.prefetch_is_bound
            ),
            offload=offload if may_offload and OFFLOAD in self.passes else None,
            offload_min_bytes=self._option(OFFLOAD, "min_bytes"),
        )

    def _option(self, name: str, option: str) -> Any:
        return option_of(self.passes, name, option)

    def _offload(
        self, joint: fx.GraphModule, names: frozenset[str], recompute: frozenset[str]
    ) -> None:
        """Let values of a joint graph wait in host memory, and backward compute others from them again."""
        copy = copy_graph_module(joint)
        forward, backward = self._split(copy, recompute, is_final=False)
        split = split_between(forward.graph, backward.graph, self._num_results)
        offload_named(joint, names, split, pin=self._option(OFFLOAD, "pin_memory"))
        joint.graph.lint()
        joint.recompile()

    def _split(
        self,
        gm: fx.GraphModule,
        names: frozenset[str],
        *,
        is_final: bool,
        is_clean: bool = False,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
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
            gm.graph, {call: frozenset(own) for call, own in in_calls.items()}, self._bodies
        )
        keep_calls(gm.graph)
        context = self._choosing(recompute=names - self._inside.keys())
        manager = PassManager([PASSES["recompute"]], is_trial=not is_final)
        report = self.report if is_final else GraphReport(self.report.name, 0, "", "")
        manager.run(gm, context, f"{self.report.name}.joint", report)
        return partition_by_tags(
            gm,
            self._joint_inputs,
            num_fwd_outputs=self._num_results,
            static_lifetime_input_indices=self._static_inputs,
            is_clean=is_clean,
        )

    def _choosing(self, **choices: Any) -> PassContext:
        return replace(self.context, choices=replace(self.context.choices or Choices(), **choices))

    def _run(self, joint: fx.GraphModule, candidate: PlanCandidate) -> TrialResult:
        """Try a candidate: run the passes on copies of its halves, and simulate memory and time of the result."""
        with known_bodies(self._bodies), self._known.trial(), sketching():
            forward, backward = self._halves(joint, candidate)
            choices = self._choosing(
                resident=candidate.resident, **candidate.transfers._asdict()
            ).choices
            assert choices is not None
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
                copies=self.context.copies,
                gathers_per_use=1 / planner.micro_steps,
                bucket_bytes=self._option("bucket", "gather_bytes"),
            )
            step = micro_step(
                *graphs,
                probe=planner.workspaces,
                transit=planner.transit,
                is_recorded=self.is_recorded,
            )
            return TrialResult(step.peak_bytes, times.overhead_us, times.copy_us)

    def _halves(self, joint: fx.GraphModule, candidate: PlanCandidate) -> list[fx.GraphModule]:
        """Return forward and backward of a candidate, before any pass runs over them.

        A search by halving asks for the same few splits many times, with different resident weights.
        """
        key = joint.graph, candidate.shards, candidate.recompute
        if key not in self._splits:
            copy = copy_graph_module(joint)
            keep_shards(copy, candidate.shards)
            self._splits[key] = self._split(
                copy,
                candidate.recompute,
                is_final=False,
                is_clean=not candidate.shards and OFFLOAD not in self.passes,
            )
        halves = self._splits[key] = self._splits.pop(key)  # moves it to the end: dropped last
        kept = self._splits
        while sum(len(half.graph.nodes) for each in kept.values() for half in each) > _MOST_NODES:
            del kept[next(iter(kept))]
        return [copy_graph_module(half) for half in halves]


@contextmanager
def _older_objects_left_alone() -> Iterator[None]:
    """Let the garbage collector look only at what the block makes.

    Copies of graphs are full of cycles. To find them, it would walk through all objects of the process each time:
    a quarter of the time that planning 32 layers took.
    """
    if gc.get_freeze_count():  # of the caller, to whom it would be undone
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
