"""Capture a model as a graph for a box of sizes, with all that the trace relied on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from torchloom._torch.full_capture import GuardOn, is_unsupported
from torchloom._torch.operators import operators_in
from torchloom._torch.shapes import mark_varying
from torchloom.bytecode import code_digest
from torchloom.errors import ServeError, TorchloomError
from torchloom.pieces.fullgraph import FullGraph, capture_full
from torchloom.pieces.symbols import SizeGuard
from torchloom.serve.builder.argument_guards import asked_of
from torchloom.serve.builder.pieces.piece import graph_digest
from torchloom.serve.builder.prove import (
    ProofVerdict,
    decision_by_value,
    multiples_to_promise,
    prove,
)
from torchloom.serve.call.conditions import Asked
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.dims import Derived, Dim, Float
from torchloom.serve.contract.specs import NumberSpec, TensorSpec
from torchloom.serve.counter import counter
from torchloom.serve.model.facts import Asker, facts_of
from torchloom.serve.model.fingerprint import Fingerprint, attributes_of, files_of
from torchloom.serve.model.target import Target, gradient_mode_of

_GLOBAL_STATE = tuple(
    GuardOn("EQUALS_MATCH", text)
    for text in (
        "torch.get_default_dtype()",
        "torch.are_deterministic_algorithms_enabled()",
        "torch.get_float32_matmul_precision()",
        "default_device()",
    )
)
"""What a trace relies on of torch's own settings; gradient mode and autocast are asked for at each call."""


@dataclass
class Traced:
    """A trace."""

    box: Box
    graph: FullGraph
    hints: dict[str, int]
    """What each size was."""
    fingerprint: Fingerprint
    """What it relied on of the model."""
    unwritten: Sequence[str]
    """What of that cannot be written down: its program cannot be stored."""
    asked: Asked
    """What it relied on of arguments."""
    derived: tuple[Derived, ...] = ()
    """Sizes that follow from those of the box."""
    floats: Mapping[float, Float] = field(default_factory=dict)
    """Arguments that vary, by what they were during the trace."""
    first_box: Box | None = None
    """The sizes that it was made for, where it stands for others now."""

    @cached_property
    def digest(self) -> str:
        """A hash of the graph, and of the bytecode that calls it."""
        shell = self.graph.shell
        names = ("graph" if name == shell.backend_id else name for name in shell.code.co_names)
        code = shell.code.replace(co_names=tuple(names))
        return f"{graph_digest(self.graph.graph_module)} {code_digest(code)}"

    def verdicts(self, more: Iterable[SizeGuard] = ()) -> list[ProofVerdict]:
        """Judge all that was assumed of sizes so far.

        Args:
            more: what was assumed where an equal graph of another trace was compiled.
        """
        guards = {guard.text: guard for guard in [*more, *self.graph.size_guards()]}
        return prove(guards.values(), self.box.dims, self.hints, self.derived, self.floats)

    def within(self, part: Box) -> Traced | None:
        """Return this trace as one for a part of its box, None if the part needs one of its own.

        Where the sizes that it saw are of the part, and the same ones vary, what it assumed is judged for the
        part's sizes alone.
        """
        varying = {dim.name for dim in self.box.varying}
        if self.hints in part and {dim.name for dim in part.varying} == varying:
            return replace(self, box=part, first_box=self.first_box or self.box)
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
    hints = box.hints(contract.derived)
    varying = {dim.name: dim for dim in box.varying}
    if any(map(torch.is_autocast_enabled, target.device_types(contract))):
        raise ServeError(
            f"{target.name} is built under autocast, which calls would have to be under too: build outside "
            "of it, and enter autocast in the model's forward"
        )
    args = _inputs(contract, hints, varying, unbacked, without)
    graph = _captured(target, contract, box, args, unbacked=bool(unbacked))
    counter.num_traces += 1
    fingerprint, unwritten = _fingerprint(target, contract, graph, args)
    return Traced(
        box,
        graph,
        hints,
        fingerprint,
        unwritten,
        asked_of(graph.guards, graph.codes, target, contract, args, varying),
        derived=contract.derived,
        floats={each.hint: each for each in contract.floats()},
    )


def _inputs(
    contract: Contract,
    hints: Mapping[str, int],
    varying: Mapping[str, Dim],
    unbacked: Collection[str],
    without: Collection[str],
) -> dict[str, Any]:
    """Return arguments to trace with, whose varying sizes are marked."""

    def make(path: str, spec: TensorSpec | NumberSpec) -> Any:
        if isinstance(spec, NumberSpec):
            return spec.value(path, hints)
        if path in without:
            return None
        made = spec.empty(hints)
        if contract.grad == "grad" and made.is_floating_point():
            made.requires_grad_()  # calls that want no gradient of it just do not use what is there
        for number, size in enumerate(spec.shape):
            if not isinstance(size, int) and (dim := varying.get(size.dim.name)):
                ends = (size.of(dim.min), size.of(dim.max))
                mark_varying(made, number, unbacked=ends if dim.name in unbacked else None)
        return made

    return contract.made(make)


def _captured(
    target: Target, contract: Contract, box: Box, args: dict[str, Any], *, unbacked: bool
) -> FullGraph:
    """Let Dynamo capture the model for arguments.

    Raises:
        ServeError: it is not one graph.
    """
    varying = {dim.name for dim in box.varying}
    try:
        with gradient_mode_of(contract):
            return capture_full(
                target.call,
                *target.divided(args),
                unbacked=unbacked,
                ints=_sources(target, contract, args, varying),
                floats=_sources(target, contract, args, None),
                ranges=box.ranges(contract.derived),
            )
    except TorchloomError:
        raise
    except Exception as error:  # torch's own mistakes while it traces come in any kind
        if not unbacked and (decision := decision_by_value(target, error)):
            raise ServeError(decision) from error
        kind = "" if is_unsupported(error) else f"{type(error).__name__}: "
        raise ServeError(
            f"{target.name} cannot be compiled for {box}: {kind}{_first_lines(error)}"
        ) from error


def _fingerprint(
    target: Target, contract: Contract, graph: FullGraph, args: Mapping[str, Any]
) -> tuple[Fingerprint, list[str]]:
    """Return what a trace relied on of the model, and what of it cannot be written down."""
    scope = target.scope(args)
    asker = Asker(scope)
    operators = [
        f"torch.ops.{name.replace('::', '.')}" for name in operators_in(graph.graph_module)
    ]
    guards = [*graph.guards, *_GLOBAL_STATE, *(GuardOn("OPERATOR", each) for each in operators)]
    varying = target.sources_of({name: args[name] for name in args if name in contract.args})
    facts, unwritten = facts_of(guards, asker, varying, graph.modules)
    facts["model"] = asker.answer("model")
    files, lost = files_of(graph.codes, asker.reader.modules, asker.reader.seen)
    return Fingerprint(facts, files, attributes_of(target)), [*unwritten, *lost]


def _sources(
    target: Target, contract: Contract, args: Mapping[str, Any], varying: Collection[str] | None
) -> list[str]:
    """Return how a trace calls the whole numbers that vary, or the floats if `varying` is None."""
    by_name = target.sources_by_name(args)
    found: list[str] = []
    for path, code, spec in contract.places():
        if not isinstance(spec, NumberSpec):
            continue
        if varying is None if spec.size is None else varying and spec.size.dim.name in varying:
            name = path.partition(".")[0]
            found += [source + code.removeprefix(name) for source in by_name[name]]
    return found


_HINTS_OF_TORCH = ("For more", "For extended", "If you suspect", "consider using", "For C++")
"""How lines begin that are about torch's own logs and source."""


def _first_lines(error: BaseException) -> str:
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(_HINTS_OF_TORCH)]
    where = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return "\n".join([*lines[:6], *where[-1:], *multiples_to_promise(str(error))])
