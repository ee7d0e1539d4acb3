"""A model as a graph for a box of sizes, with all that the trace relied on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchloom._torch.fullgraph import FullGraph, capture_full, is_unsupported, mark_varying
from torchloom._torch.symbols import SizeGuard
from torchloom.errors import ServeError
from torchloom.serve.box import Box
from torchloom.serve.contract import Contract
from torchloom.serve.counter import counter
from torchloom.serve.facts import Facts, Sources, facts_of
from torchloom.serve.prove import Verdict, prove
from torchloom.serve.specs import Dim, TensorSpec
from torchloom.serve.target import Target, as_promised

_GLOBAL_STATE = (
    "torch.get_default_dtype()",
    "torch.are_deterministic_algorithms_enabled()",
    "torch.get_float32_matmul_precision()",
)
"""What a trace relies on of torch's own settings; gradient mode and autocast are asked for at each call."""


@dataclass
class Traced:
    """A trace."""

    box: Box
    graph: FullGraph
    hints: dict[str, int]
    """What each size was."""
    facts: Facts
    unwritten: Sequence[str]
    """What it relied on that cannot be written down: its program cannot be stored."""
    sources: Sources
    assumed: tuple[SizeGuard, ...] = ()
    """What the trace itself assumed of sizes; compiling its graph may add to it."""
    is_unbacked: bool = False
    numbers: Mapping[int, int] | None = None
    """The sizes that its graph is to be compiled for, by hint; None where they stay symbols."""

    def verdicts(self, more: Iterable[SizeGuard] = ()) -> list[Verdict]:
        """Judge all that was assumed of sizes so far.

        Args:
            more: what was assumed where an equal graph of another trace was compiled.
        """
        if self.numbers is not None:
            return prove(self.assumed, self.box.dims, self.hints)
        guards = self.graph.size_guards()
        known = {guard.text for guard in guards}
        others = {guard.text: guard for guard in more if guard.text not in known}
        return prove([*guards, *others.values()], self.box.dims, self.hints)

    def within(self, part: Box) -> Traced | None:
        """Return this trace as one for a part of its box, if it stands for it.

        It does where the sizes that it saw are of the part, and the same ones vary: what it assumed is then
        judged for the part's sizes alone. It also does for exact sizes for which all holds that it assumed.
        """
        varying = {dim.name for dim in self.box.varying}
        if self.hints in part and {dim.name for dim in part.varying} == varying:
            return replace(self, box=part)
        if part.varying or self.is_unbacked:
            return None
        numbers = {self.hints[name]: size for name, size in part.largest.items() if name in varying}
        if all(g.holds({**{h: h for h in g.hints}, **numbers}) for g in self.assumed):
            return replace(self, box=part, numbers=numbers)
        return None


def trace(
    target: Target,
    contract: Contract,
    box: Box,
    *,
    unbacked: Collection[str] = (),
    without: Collection[str] = (),
) -> Traced:
    """Trace a model; nothing is executed.

    Args:
        target: the model.
        contract: what its arguments look like.
        box: which sizes the trace has to stand for.
        unbacked: dims that nothing may branch on.
        without: paths of optional tensors that are None.

    Raises:
        ServeError: the model is not one graph, or branches on an unbacked size.
    """
    hints = box.hints()
    varying = {dim.name for dim in box.varying}

    def make(path: str, spec: TensorSpec) -> Tensor | None:
        if path in without:
            return None
        made = spec.empty(hints)
        for number, dim in enumerate(spec.shape):
            if isinstance(dim, Dim) and dim.name in varying:
                ends = next((d.min, d.max) for d in box.dims if d.name == dim.name)
                mark_varying(made, number, unbacked=ends if dim.name in unbacked else None)
        return made

    if any(map(torch.is_autocast_enabled, target.device_types(contract))):
        raise ServeError(
            f"{target.name} is built under autocast, which calls would have to be under too: build outside "
            "of it, and enter autocast in the model's forward"
        )
    args = contract.made(make)
    try:
        with as_promised(contract):
            graph = capture_full(target.call, (), args, unbacked=bool(unbacked))
    except Exception as error:
        if not is_unsupported(error):
            raise
        raise ServeError(
            f"{target.name} cannot be compiled for {box}: {_first_lines(error)}"
        ) from error
    counter.num_traces += 1
    scope = target.scope(args)
    facts, unwritten = facts_of(
        [*graph.sources, *_GLOBAL_STATE], scope, contract.args, target.rest, graph.modules
    )
    assumed = tuple(graph.size_guards())
    return Traced(
        box,
        graph,
        hints,
        facts,
        unwritten,
        Sources.of(graph.codes),
        assumed,
        is_unbacked=bool(unbacked),
    )


def _first_lines(error: BaseException) -> str:
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    where = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return "\n".join([*lines[:6], *where[-1:]])
