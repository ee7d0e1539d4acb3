"""A body: what one of several equal parts of a graph computes, traced once and split once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from torchloom._torch.aot import prepare_joint
from torchloom._torch.bodies import AmbientAutocast, TracedPart, trace_part
from torchloom._torch.dynamo import is_restart
from torchloom._torch.tensors import fake_like
from torchloom.errors import RegionError
from torchloom.graph import args_of, digest_of, lower_readers, read_lower, value_of
from torchloom.ops.regions import BodyHalf
from torchloom.regions.halves import Halves, SplitBody, split_body, storage_problem
from torchloom.regions.labels import graph_form


@dataclass(eq=False)
class RegionBody:
    """What equal parts compute; calls of `torchloom.ops.regions` name it.

    Args:
        name: a hash of all that its code depends on.
        captured: the part as Dynamo captured it: operands in, a tuple of results out.
        operands: fake tensors like those that it reads.
        sizes: symbolic numbers that it reads, or that are in the shapes of operands.
        weights: operands that are gathered weights, by index.
        regathers: whether backward gathers them again.
        casts: whether weights that are only read in a lower dtype are given in it.
        for_inductor: whether Inductor will compile it.
        split: makes forward and backward of its joint graph.
        recompute: values of forward that its backward computes again, where a plan says so.
    """

    name: str
    captured: fx.GraphModule
    operands: Sequence[Tensor]
    sizes: Sequence[Any]
    weights: frozenset[int]
    regathers: bool
    casts: bool
    for_inductor: bool
    split: SplitBody
    ambient: AmbientAutocast
    recompute: frozenset[str] = frozenset()
    modules: dict[int, str] = field(default_factory=dict)
    """By the number of a call, the module that it stands for, as Dynamo names it; the first is the body's own."""
    num_traces: int = 0
    num_splits: int = 0
    lowered: dict[bool, dict[int, torch.dtype]] = field(
        default_factory=lambda: {True: {}, False: {}}
    )
    """With and without backward: operands that are given in another dtype than the captured graph's."""

    _others: dict[frozenset[str], RegionBody] = field(default_factory=dict)
    """Bodies of the same joint graph, by what their backwards compute again."""

    @property
    def copies_gradients(self) -> bool:
        """Whether gradients that lie otherwise are copied: what Inductor fuses adds up in an order of its own anyway."""
        return self.for_inductor

    @cached_property
    def joint(self) -> TracedPart:
        """The part with its backward."""
        return self._trace(trains=True)

    @property
    def joint_graph(self) -> fx.Graph:
        """Forward and backward before they were split."""
        return self.joint.graph_module.graph

    def recomputing(self, names: frozenset[str]) -> RegionBody:
        """Return the body of the same joint graph whose backward computes values of forward again.

        Bodies that keep the same values are one body.

        Args:
            names: of nodes of the joint graph.
        """
        if names == self.recompute:
            return self
        if names not in self._others:
            other = replace(self, recompute=names, num_traces=0, num_splits=0, _others={})
            other.joint = self.joint
            kept = other.halves.kept_text
            known = [self, *self._others.values()]
            digest = digest_of(kept)
            other.name = f"{self.name}k{digest}"
            alike = (each for each in known if each.halves.kept_text == kept)
            self._others[names] = next(alike, other)
        return self._others[names]

    @cached_property
    def inference(self) -> TracedPart:
        """The part alone, for calls without gradients."""
        return self._trace(trains=False)

    @cached_property
    def halves(self) -> Halves:
        """Forward and backward."""
        self.num_splits += 1
        again = self.weights if self.regathers else frozenset()
        return split_body(self.joint, self.split, again, self.recompute)

    @cached_property
    def variants(self) -> dict[str, fx.GraphModule]:
        """Halves for other inputs than the body's own, by what their calls name."""
        return {}

    def half(self, kind: BodyHalf) -> fx.GraphModule:
        """Return the graph that a call runs."""
        if kind == "inference":
            return self.inference.graph_module
        return self.halves.forward if kind == "forward" else self.halves.backward

    def digest(self) -> str:
        """Return a hash of all graphs that have been made of it."""
        graphs = [self.inference.graph_module] if "inference" in self.__dict__ else []
        if "halves" in self.__dict__:
            graphs += [self.halves.forward, self.halves.backward]
        return digest_of(" ".join(graph_form(each.graph) for each in graphs))

    def lower_operands(self, *, trains: bool) -> Mapping[int, torch.dtype]:
        """Return the operands that a call casts first, by index, and their dtypes."""
        return self.lowered[trains]

    def forward_values(self, *, trains: bool) -> Sequence[Tensor]:
        """Return the fake results of a call; with `trains`, also what backward reads of its values."""
        return _results(self.halves.forward if trains else self.inference.graph_module)

    def backward_values(self) -> Sequence[Tensor]:
        """Return the fake gradients of the operands that have one."""
        return _results(self.halves.backward)

    @property
    def num_results(self) -> int:
        """How many of the forward's values a graph reads."""
        return self.joint.num_results

    @property
    def kept_operands(self) -> Sequence[int]:
        """Operands that backward reads, by index."""
        return self.halves.kept_operands

    @property
    def kept_results(self) -> Sequence[int]:
        """Results that backward reads, by index."""
        return self.halves.kept_results

    @property
    def differentiated(self) -> Sequence[int]:
        """Operands that have a gradient, by index."""
        return self.halves.differentiated

    @property
    def tangents(self) -> Sequence[Tensor | None]:
        """Fake gradients of the results as backward takes them, None for results without one."""
        return self.halves.tangents

    def _trace(self, *, trains: bool) -> TracedPart:
        self.num_traces += 1
        inputs: list[Any] = [
            fake_like(each, requires_grad=trains and each.requires_grad) for each in self.operands
        ]
        inputs += self.sizes
        try:
            with self.ambient.again():
                traced = trace_part(
                    self.captured, inputs, trains=trains, for_inductor=self.for_inductor
                )
        except Exception as error:
            if is_restart(error):
                raise
            reason = str(error).partition("\n")[0]
            raise RegionError(f"torch cannot trace it by itself: {reason}") from error
        problem = traced.problem or storage_problem(traced.graph_module.graph)
        if problem is not None:
            raise RegionError(problem)
        if self.casts:
            self._cast_first(traced.graph_module, trains=trains)
        return (
            replace(traced, graph_module=prepare_joint(traced.graph_module)) if trains else traced
        )

    def _cast_first(self, graph_module: fx.GraphModule, *, trains: bool) -> None:
        """Take weights in the dtype in which the body reads them: they are then gathered in it."""
        graph = graph_module.graph
        inputs = graph.find_nodes(op="placeholder")
        for index in sorted(self.weights):
            readers = lower_readers(inputs[index])
            if readers is None:
                continue
            given = inputs[index]
            with graph.inserting_before(given):
                lower = graph.placeholder(f"{given.name}_cast")
            lower.meta = {**given.meta, "val": fake_like(value_of(given), dtype=readers.dtype)}
            read_lower(graph, given, lower, readers)
            name = given.name
            graph.erase_node(given)
            lower.name = name
            self.lowered[trains][index] = readers.dtype
        graph_module.recompile()


def _results(half: fx.GraphModule) -> list[Tensor]:
    return [value_of(node) for node in args_of(half.graph.output_node())[0]]
