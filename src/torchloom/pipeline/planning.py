"""Where planning enters a compile: between the joint passes and the split.

The planner tries choices on the joint graph. Passes that run after the split (placing, bucketing,
prefetching) move nodes, so the choice is then tried on copies of the split graphs as those passes
leave them: what was simulated is what runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from torchloom._torch import partition as torch_partition
from torchloom.backends.graphs import copy_graph_module
from torchloom.capture import partition_by_tags
from torchloom.capture.hooks import GraphKind
from torchloom.graph import Choices, PassContext
from torchloom.passes import PASSES
from torchloom.pipeline.manager import PassManager
from torchloom.pipeline.report import GraphReport
from torchloom.plan import Planner, Task
from torchloom.plan.memory import Interface, interface_of, micro_step, replay_peak

Lower = Callable[[fx.GraphModule, GraphKind], None]
"""Runs the lowered passes over a graph: `(gm, "forward" or "backward")`."""


class PlannedSplit:
    """A partitioner that plans first.

    Args:
        planner: chooses under the budget.
        context: what passes may know.
        lower: the passes behind the split, for trials; None where there are none.
        report: receives the plan.
        name: the graph's, in reports.
    """

    def __init__(
        self,
        planner: Planner,
        context: PassContext,
        lower: Lower | None,
        report: GraphReport,
        name: str,
    ) -> None:
        self._planner, self._context, self._lower = planner, context, lower
        self._report, self._name = report, name
        self._interface: Interface | None = None

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

        def split(gm: fx.GraphModule, names: frozenset[str], *, is_final: bool) -> Any:
            self._tag(gm, names, is_final=is_final)
            return partition_by_tags(
                gm,
                joint_inputs,
                num_fwd_outputs=num_fwd_outputs,
                static_lifetime_input_indices=static_lifetime_input_indices,
            )

        untouched = copy_graph_module(joint)  # the split writes tags

        def verify(names: frozenset[str]) -> int:
            forward, backward = split(copy_graph_module(untouched), names, is_final=False)
            if self._lower is not None:
                self._lower(forward, "forward")
                self._lower(backward, "backward")
            graphs = (forward.graph, backward.graph)
            self._planner.workspaces.probe(node for graph in graphs for node in graph.nodes)
            return micro_step(*graphs, probe=self._planner.workspaces).peak_bytes

        plan = self._planner.plan(
            Task(
                joint=untouched.graph,
                num_results=num_fwd_outputs,
                verify=verify,
                batch_bytes=self._report.batch_bytes,
            )
        )
        self._report.plan = plan
        forward, backward = split(joint, plan.recompute, is_final=True)
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
        return replay_peak(forward, backward, self._interface, self._planner.workspaces)

    def _tag(self, gm: fx.GraphModule, names: frozenset[str], *, is_final: bool) -> None:
        known = self._context.choices or Choices()
        context = dataclasses.replace(
            self._context, choices=dataclasses.replace(known, recompute=names)
        )
        manager = PassManager([PASSES["recompute"]], context, tells=is_final)
        report = self._report if is_final else GraphReport(self._name, 0, "", "")
        manager.run(gm, context, f"{self._name}.joint", report)
