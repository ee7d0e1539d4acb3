"""The partitioner that plans: it first makes a plan, then splits the joint graph by it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx

from torchloom._torch import partition as torch_partition
from torchloom.backends.graphs import copy_graph_module
from torchloom.capture.hooks import Bodies
from torchloom.graph import GraphPass, PassContext
from torchloom.memory import Interface, interface_of, replay_peak
from torchloom.pipeline.activation_transfers import keep_shards, reloaded_bytes
from torchloom.pipeline.report import GraphReport
from torchloom.pipeline.trials import OFFLOAD, SELECTIVE, GraphTrials, Lower
from torchloom.plan import Planner

__all__ = ["OFFLOAD", "SELECTIVE", "Lower", "PlannedSplit"]


class PlannedSplit:
    """A partitioner that plans first.

    Args:
        planner: chooses a plan that keeps the memory budget.
        context: what passes may know.
        lower: the passes behind the split, for trials.
        report: receives the plan.
        tell_phase: told "plan", and "rest" when there is one.
        passes: the passes that run; a plan decides only what they can carry out, within their options.
    """

    def __init__(
        self,
        planner: Planner,
        context: PassContext,
        lower: Lower,
        report: GraphReport,
        passes: Iterable[GraphPass],
        tell_phase: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._tell_phase = tell_phase
        self._planner, self._context, self._lower = planner, context, lower
        self._report, self._passes = report, {each.name: each for each in passes}
        self._interface: Interface | None = None
        self._fetched: frozenset[str] = frozenset()

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
        trials = GraphTrials(
            planner=self._planner,
            context=self._context,
            lower=self._lower,
            report=self._report,
            passes=self._passes,
            joint_inputs=joint_inputs,
            num_results=num_fwd_outputs,
            static_inputs=static_lifetime_input_indices,
            bodies=bodies,
        )
        # Splitting writes tags into the graph, so trials split copies.
        started = time.perf_counter()
        self._tell_phase("plan")
        with _older_objects_left_alone():
            plan = self._planner.plan(trials.problem(copy_graph_module(joint, is_sketch=True)))
        self._report.planning_s += time.perf_counter() - started
        self._report.plan = plan
        trials.forget()
        self._tell_phase("rest")
        if plan.offload:
            trials.offload(joint, plan.offload, plan.again)
        self._fetched = frozenset(reloaded_bytes(joint)) - frozenset(plan.pieces)
        keep_shards(joint, plan.pieces)
        forward, backward = trials.split(joint, plan.recompute, is_final=True)
        self._interface = interface_of(forward.graph, backward.graph)
        return forward, backward

    def replay(self, sources: Mapping[str, str]) -> int | None:
        """Return the peak in bytes of the code that a compiler wrote for the two graphs.

        Args:
            sources: Python code by "forward" and "backward".

        Returns:
            Bytes beyond the memory that was in use before the graphs; None if unknown.
        """
        if self._interface is None or not {"forward", "backward"} <= sources.keys():
            return None
        forward, backward = sources["forward"], sources["backward"]
        planner = self._planner
        return replay_peak(
            *(forward, backward, self._interface, planner.workspaces, planner.transit),
            fetched=self._fetched,
        )


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
