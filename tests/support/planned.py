"""A model's graph, captured once and then compiled and run under many plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchloom._torch import aot as torch_partition
from torchloom._torch.aot import copy_graph_module
from torchloom.capture import WeaveHooks, compile_with_aot, partition_by_tags
from torchloom.graph import Choices, GraphPass, PassContext
from torchloom.passes import PASSES
from torchloom.pipeline.manager import PassManager
from torchloom.pipeline.report import GraphReport


@dataclasses.dataclass
class Planned:
    """What one plan made of the graph."""

    joint: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule
    run: Any
    inputs: list[Any]

    def step(self) -> Any:
        """Run forward and backward; return the results, which a caller would hold."""
        results = self.run(*self.inputs)
        results[0].backward()
        return results


class Captured:
    """A captured model."""

    def __init__(self, model: nn.Module, batch: Sequence[Tensor]) -> None:
        self.model = model
        self._inputs: list[Any] = []

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            self._gm, self._examples = gm, list(example_inputs)
            plain = copy_graph_module(gm)

            def run(*args: Any) -> Any:
                self._inputs = list(args)
                return plain.forward(*args)

            return run

        torch._dynamo.reset()
        torch.compile(model, backend=backend, fullgraph=True)(*batch)

    def planned(self, choices: Choices | None = None, names: Sequence[str] = ()) -> Planned:
        """Compile under a plan: passes `names` and `recompute`, on the boxed route."""
        found: dict[str, fx.GraphModule] = {}
        context = PassContext(world_size=1, choices=choices)
        joint_pass = [PASSES[name] for name in (*names, "recompute")]

        def joint(gm: fx.GraphModule, kind: str) -> None:
            found["joint"] = gm
            _run(joint_pass, gm, context, kind)

        def lowered(gm: fx.GraphModule, kind: str) -> None:
            found[kind] = gm

        hooks = WeaveHooks(
            joint=joint,
            lowered=lowered,
            key=None,
            partition=None if choices is None else partition_by_tags,
        )
        run = compile_with_aot(copy_graph_module(self._gm), self._examples, hooks)
        run(*self._inputs)[0].backward()  # backward is compiled at its first run
        self.drop_gradients()
        return Planned(found["joint"], found["forward"], found["backward"], run, self._inputs)

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for param in self.model.parameters():
            param.grad = None

    def to_plan(self) -> tuple[fx.Graph, int]:
        """Return the joint graph as a planner gets it, and how many of its outputs are results."""
        found: list[tuple[fx.Graph, int]] = []

        def partition(joint, inputs, *, num_fwd_outputs, **rest):
            joint = torch_partition.prepare_joint(joint)
            found.append((copy_graph_module(joint).graph, num_fwd_outputs))
            return partition_by_tags(joint, inputs, num_fwd_outputs=num_fwd_outputs, **rest)

        hooks = WeaveHooks(
            joint=lambda gm, kind: None,
            lowered=lambda gm, kind: None,
            key=None,
            partition=partition,
        )
        compile_with_aot(copy_graph_module(self._gm), self._examples, hooks)
        return found[0]


def _run(passes: list[GraphPass], gm: fx.GraphModule, context: PassContext, name: str) -> None:
    PassManager(passes).run(gm, context, name, GraphReport(name, 0, "test", ""))
