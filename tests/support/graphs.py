"""Captured graphs without ranks: shapes and operators are real, nothing is communicated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torchloom.runtime  # noqa: F401  binds the operators
from torchloom._torch.aot import aot_compile, min_cut_partition
from torchloom.errors import ShardError
from torchloom.graph import PassContext
from torchloom.passes import PASSES
from torchloom.pipeline.manager import PassManager
from torchloom.pipeline.report import GraphReport
from torchloom.shard import plan_layout, shard_module

CONTEXT = PassContext(world_size=2)
Options = Mapping[str, Mapping[str, object]]
NO_OPTIONS: Options = {}


class TwoLayers(nn.Module):
    """Two linear layers whose input needs no gradient, one of them with a small bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x))).square().mean()


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(ids)), ids)


def captured(
    model: nn.Module,
    inputs: Sequence[Tensor],
    joint_passes: Sequence[str] = (),
    *,
    stage: int = 3,
    threshold: int = 20,
    context: PassContext = CONTEXT,
    options: Options = NO_OPTIONS,
) -> dict[str, fx.GraphModule]:
    """Shard `model` for rank 0 of 2 and return its joint, forward and backward graphs.

    The joint passes named run before the split; the graphs are copies, free to be edited.
    """
    layout = plan_layout(
        model, stage=stage, world_size=2, rank=0, handle="2x1#test", persistence_threshold=threshold
    )
    shard_module(model, layout)
    found: dict[str, fx.GraphModule] = {}

    def as_is(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        return gm.forward

    def partition(gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        apply(gm, joint_passes, context, options)
        found["joint"] = copy_of(gm)
        forward, backward = min_cut_partition(gm, joint_inputs, **kwargs)
        found["forward"], found["backward"] = copy_of(forward), copy_of(backward)
        return forward, backward

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        return aot_compile(
            gm, example_inputs, forward=as_is, backward=as_is, partition=partition, inference=as_is
        )

    torch._dynamo.reset()
    # Running the graphs would need the ranks; capturing them does not.
    with contextlib.suppress(ShardError):
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return found


def apply(
    gm: fx.GraphModule,
    names: Sequence[str],
    context: PassContext = CONTEXT,
    options: Options = NO_OPTIONS,
) -> GraphReport:
    """Run passes by name over a graph, with options by the names of passes."""
    report = GraphReport("graph", len(gm.graph.nodes), "test", digest="0")
    passes = [PASSES[name].with_options(**options.get(name, {})) for name in names]
    PassManager(passes).run(gm, context, "graph.test", report)
    return report


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph with its recorded values and tags."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(gm.graph, {}))
    output, original = copy.output_node(), gm.graph.output_node()
    output.meta.update(original.meta)
    return fx.GraphModule(gm, copy)
