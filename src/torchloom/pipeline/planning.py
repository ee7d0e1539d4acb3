"""Where planning enters a compile: between the joint passes and the split.

The planner tries choices on the joint graph. Passes that run after the split (placing, bucketing,
prefetching, copies) move nodes, so each choice is then tried on copies of the split graphs as those
passes leave them: what was simulated is what runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import _torch, ops
from torchloom._torch import partition as torch_partition
from torchloom.backends.graphs import copy_graph_module
from torchloom.capture import partition_by_tags
from torchloom.capture.hooks import GraphKind
from torchloom.costs import CollectiveKind
from torchloom.costs.timeline import timeline
from torchloom.graph import (
    Choices,
    GraphPass,
    KnownValues,
    PassContext,
    Split,
    args_of,
    find,
    forward_nodes,
    is_view,
    nbytes,
    value_of,
)
from torchloom.memory import Interface, interface_of, micro_step, replay_peak
from torchloom.passes import PASSES
from torchloom.passes.offload_activation import offload_named
from torchloom.pipeline.manager import PassManager
from torchloom.pipeline.report import GraphReport
from torchloom.plan import Flight, Outcome, Planner, Task, Trial
from torchloom.plan.traffic import Gathered, Traffic

Lower = Callable[[fx.GraphModule, GraphKind, Choices], None]
"""Runs the lowered passes over a graph: `(gm, "forward" or "backward", what was chosen)`."""

OFFLOAD, SELECTIVE = "offload_activation", "selective_gather"
"""Passes that do what a plan says, where there is one."""
_MOST_NODES = 20_000
"""Of the splits that are remembered in all: about 60 MB."""
_STEP = 4
"""By what buckets and prefetching are divided, and prefetching multiplied, to be tried."""


class PlannedSplit:
    """A partitioner that plans first.

    Args:
        planner: chooses under the budget.
        context: what passes may know.
        lower: the passes behind the split, for trials.
        report: receives the plan.
        passes: those that run: what a plan may decide about, within their options.
    """

    def __init__(
        self,
        planner: Planner,
        context: PassContext,
        lower: Lower,
        report: GraphReport,
        passes: Iterable[GraphPass],
    ) -> None:
        self._planner, self._context, self._lower = planner, context, lower
        self._report, self._passes = report, {each.name: each for each in passes}
        self._interface: Interface | None = None
        self._fetched: frozenset[str] = frozenset()

    def __call__(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph as the plan for it says."""
        joint = torch_partition.prepare_joint(joint)
        trials = _Trials(self, joint_inputs, num_fwd_outputs, static_lifetime_input_indices)
        # The split writes tags, so what is tried is tried on copies.
        started = time.perf_counter()
        plan = self._planner.plan(trials.task(copy_graph_module(joint, is_sketch=True)))
        self._report.planning_s += time.perf_counter() - started
        self._report.plan = plan
        trials.forget()
        if plan.offload:
            trials.move(joint, plan.offload, plan.again)
        self._fetched = frozenset(_pieces(joint)) - frozenset(plan.pieces)
        _keep_pieces(joint, plan.pieces)
        forward, backward = trials.split(joint, plan.recompute, is_final=True)
        self._interface = interface_of(forward.graph, backward.graph)
        return forward, backward

    def replay(self, sources: Mapping[str, str]) -> int | None:
        """Return the peak of the code that a compiler wrote for the two graphs, None if unknown.

        Args:
            sources: Python code by "forward" and "backward".
        """
        if self._interface is None or not {"forward", "backward"} <= sources.keys():
            return None
        forward, backward = sources["forward"], sources["backward"]
        planner = self._planner
        return replay_peak(
            *(forward, backward, self._interface, planner.workspaces, planner.transit),
            fetched=self._fetched,
        )


class _Trials:
    """Splits copies of one joint graph, and says what becomes of them."""

    def __init__(
        self,
        owner: PlannedSplit,
        joint_inputs: Any,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None,
    ) -> None:
        self._planner, self._context = owner._planner, owner._context
        self._lower, self._report, self._passes = owner._lower, owner._report, owner._passes
        self._joint_inputs, self._num_results = joint_inputs, num_fwd_outputs
        self._static = static_lifetime_input_indices
        self._known = KnownValues()
        self._splits: dict[Any, Sequence[fx.GraphModule]] = {}

    def task(self, joint: fx.GraphModule, *, may_swap: bool = True) -> Task:
        """Return what is to be planned about a joint graph, which stays as it is."""

        def swap(names: frozenset[str], again: frozenset[str]) -> Task:
            moved = copy_graph_module(joint, is_sketch=True)
            self.move(moved, names, again)
            return self.task(moved, may_swap=False)

        traffic = self._traffic(joint)
        may_stay = traffic.gathers if SELECTIVE in self._passes else {}
        return Task(
            joint=joint.graph,
            num_results=self._num_results,
            verify=lambda trial: self._try(joint, trial),
            batch_bytes=self._report.batch_bytes,
            weights={name: each.num_bytes for name, each in may_stay.items()},
            pieces=_pieces(joint),
            kind=self._report.kind,
            traffic=traffic,
            flights=self._flights(traffic),
            swap=swap if may_swap and OFFLOAD in self._passes else None,
            swap_min_bytes=self._option(OFFLOAD, "min_bytes"),
        )

    def move(self, joint: fx.GraphModule, names: frozenset[str], again: frozenset[str]) -> None:
        """Let values wait in host memory; what backward computes again reads what comes back."""
        copy = copy_graph_module(joint, is_sketch=True)
        forward, backward = self.split(copy, again, is_final=False)
        inputs = {node.name for node in backward.graph.find_nodes(op="placeholder")}
        split = Split(
            forward=_computed(forward.graph),
            backward=_computed(backward.graph),
            saved=frozenset(name for name in inputs if not name.startswith("tangents")),
            num_outputs=self._num_results,
        )
        offload_named(joint, names, split, pin=self._option(OFFLOAD, "pin_memory"))
        joint.graph.lint()
        joint.recompile()

    def split(self, gm: fx.GraphModule, names: frozenset[str], *, is_final: bool) -> Any:
        """Return forward and backward when backward computes the named values again."""
        known = self._context.choices or Choices()
        context = dataclasses.replace(
            self._context, choices=dataclasses.replace(known, recompute=names)
        )
        manager = PassManager([PASSES["recompute"]], context, is_trial=not is_final)
        report = self._report if is_final else GraphReport(self._report.name, 0, "", "")
        manager.run(gm, context, f"{self._report.name}.joint", report)
        return partition_by_tags(
            gm,
            self._joint_inputs,
            num_fwd_outputs=self._num_results,
            static_lifetime_input_indices=self._static,
        )

    def _try(self, joint: fx.GraphModule, trial: Trial) -> Outcome:
        with self._known.trial(), _torch.sketching():
            return self._outcome(joint, trial)

    def _outcome(self, joint: fx.GraphModule, trial: Trial) -> Outcome:
        forward, backward = self._halves(joint, trial)
        known = self._context.choices or Choices()
        choices = dataclasses.replace(known, resident=trial.resident, **trial.flight._asdict())
        self._lower(forward, "forward", choices)
        self._lower(backward, "backward", choices)
        planner, graphs = self._planner, (forward.graph, backward.graph)
        planner.workspaces.probe(node for graph in graphs for node in graph.nodes)
        found = timeline(
            graphs,
            planner.costs,
            self._context.world_size,
            gathers_per_use=1 / planner.micro_steps,
            bucket_bytes=self._option("bucket", "gather_bytes"),
        )
        peak_bytes = micro_step(
            *graphs, probe=planner.workspaces, transit=planner.transit
        ).peak_bytes
        return Outcome(peak_bytes, found.overhead_us, found.copy_us)

    def _halves(self, joint: fx.GraphModule, trial: Trial) -> list[fx.GraphModule]:
        """Return forward and backward of a trial, before any pass runs over them.

        Searches by halving come to the same few splits again and again, with other weights resident.
        """
        key = joint.graph, trial.pieces, trial.recompute
        if key not in self._splits:
            copy = copy_graph_module(joint, is_sketch=True)
            _keep_pieces(copy, trial.pieces)
            self._splits[key] = self.split(copy, trial.recompute, is_final=False)
        halves = self._splits[key] = self._splits.pop(key)  # the last to be dropped
        while _num_nodes(self._splits.values()) > _MOST_NODES:
            del self._splits[next(iter(self._splits))]
        return [copy_graph_module(half, is_sketch=True) for half in halves]

    def forget(self) -> None:
        """Let go of what is only known to make trials faster."""
        self._known = KnownValues()
        self._splits.clear()

    def _flights(self, traffic: Traffic) -> tuple[Flight, ...]:
        """Return other ways to send than what the config says: more ahead, less, and in smaller buckets."""
        found, configured = list[Flight](), self._option("prefetch", "max_bytes")
        gathered = sum(each.num_bytes for each in traffic.gathers.values())
        most = max(gathered, *traffic.reductions.values())
        if not most:
            return ()
        ahead = min(configured, most)
        gather, reduce = (self._option("bucket", f"{kind}_bytes") for kind in ("gather", "reduce"))
        bucket = min(max(gather, reduce), most)
        if gathered and "prefetch" in self._passes:
            found.append(Flight(prefetch_bytes=ahead // _STEP))
            if gathered > configured and not self._planner.prefetch_is_bound:
                found.append(Flight(prefetch_bytes=_STEP * configured))
        if "bucket" in self._passes:
            found.append(Flight(bucket // _STEP, ahead // _STEP))
            found.append(Flight(0, 0))
        return tuple(found)

    def _option(self, name: str, option: str) -> Any:
        """Return what a pass is given; its default where it does not run."""
        return self._passes.get(name, PASSES[name]).option(option)

    def _traffic(self, joint: fx.GraphModule) -> Traffic:
        """Return what this graph sends whatever is decided about it."""
        world_size, forward = self._context.world_size, set(forward_nodes(joint.graph))
        gathers: dict[str, Gathered] = {}
        if self._context.shared_weights is None:  # else they lie whole in memory that ranks share
            for node in find(joint.graph, ops.gather):
                shard, _shape, dtype, *_, name = args_of(node)
                size = value_of(shard).numel() * world_size * dtype.itemsize
                known = gathers.get(name, Gathered(0, 2))
                runs = min(known.num_runs, _runs(node, forward))
                gathers[name] = Gathered(known.num_bytes + size, runs)
        reductions: dict[CollectiveKind, int] = {
            "reduce_scatter": sum(nbytes(args_of(n)[0]) for n in find(joint.graph, ops.reduce)),
            "all_reduce": sum(nbytes(args_of(n)[0]) for n in find(joint.graph, ops.sync)),
        }
        # A bucket in use, those ahead of it, and one weight that is larger than a bucket.
        ahead = _STEP * self._option("prefetch", "max_bytes")
        largest = max((each.num_bytes for each in gathers.values()), default=0)
        in_flight = self._option("bucket", "gather_bytes") + ahead + largest
        return Traffic(world_size, gathers, reductions, in_flight)


def _num_nodes(splits: Iterable[Sequence[fx.GraphModule]]) -> int:
    return sum(len(half.graph.nodes) for halves in splits for half in halves)


def _runs(gather: fx.Node, forward: Collection[fx.Node]) -> int:
    """Return how often a weight is gathered in a run: again where backward reads it, if it may."""
    if gather.meta.get("recompute") is not CheckpointPolicy.MUST_RECOMPUTE:
        return 1
    chain = [gather]
    for node in chain:  # grows while it is walked
        if any(user not in forward and user.op == "call_function" for user in node.users):
            return 2
        chain += [user for user in node.users if is_view(user)]
    return 1


def _reloaded(joint: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    """Yield the pieces that come from the host, by the names of parameters, and what reloads them."""
    for gather in find(joint.graph, ops.gather):
        piece = args_of(gather)[0]
        if piece.target is ops.reload:
            yield args_of(gather)[-1], piece


def _pieces(joint: fx.GraphModule) -> dict[str, int]:
    """Return the pieces that wait on the host, with their bytes."""
    return {name: nbytes(reload) for name, reload in _reloaded(joint)}


def _keep_pieces(joint: fx.GraphModule, names: Collection[str]) -> None:
    """Let gathers of these parameters read a piece that is on the device: it is not reloaded."""
    # A piece that is gathered in two dtypes is reloaded once.
    for reload in dict.fromkeys(each for name, each in _reloaded(joint) if name in names):
        reload.replace_all_uses_with(args_of(reload)[0])
        joint.graph.erase_node(reload)


def _computed(graph: fx.Graph) -> frozenset[str]:
    return frozenset(node.name for node in graph.nodes if node.op == "call_function")
