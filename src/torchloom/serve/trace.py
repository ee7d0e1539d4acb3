"""A model as a graph for a box of sizes, with all that the trace relied on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor

from torchloom._torch.fullgraph import FullGraph, capture_full, is_unsupported, mark_varying
from torchloom._torch.symbols import SizeGuard
from torchloom.errors import ServeError
from torchloom.serve.box import Box
from torchloom.serve.contract import Contract
from torchloom.serve.counter import counter
from torchloom.serve.facts import Sources, facts_of
from torchloom.serve.prove import Verdict, prove
from torchloom.serve.specs import Dim, TensorSpec
from torchloom.serve.target import Target, as_promised


@dataclass
class Traced:
    """A trace."""

    box: Box
    graph: FullGraph
    hints: dict[str, int]
    """What each size was."""
    facts: dict[str, str]
    sources: Sources

    def verdicts(self, more: Iterable[SizeGuard] = ()) -> list[Verdict]:
        """Judge all that was assumed of sizes so far.

        Args:
            more: what was assumed where an equal graph of another trace was compiled.
        """
        guards = self.graph.size_guards()
        known = {guard.text for guard in guards}
        others = {guard.text: guard for guard in more if guard.text not in known}
        return prove([*guards, *others.values()], self.box.dims, self.hints)


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
    facts = facts_of(graph.sources, scope, contract.args, target.rest)
    return Traced(box, graph, hints, facts, Sources.of(graph.codes))


def _first_lines(error: BaseException) -> str:
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    where = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return "\n".join([*lines[:6], *where[-1:]])
