"""Capture a model as a graph for a box of sizes, with all that the trace relied on."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchloom._torch.full_capture import GuardOn, is_unsupported
from torchloom._torch.operators import hidden_kernels, operators_in
from torchloom._torch.shapes import mark_varying
from torchloom.errors import ServeError, TorchloomError
from torchloom.pieces.fullgraph import FullGraph, capture_full
from torchloom.pieces.places import Place, place_of, settled, value_at
from torchloom.pieces.symbols import SizeGuard
from torchloom.serve.builder.proof_errors import decision_by_value, multiples_to_promise
from torchloom.serve.builder.prove import ProofVerdict, prove
from torchloom.serve.builder.trace.argument_guards import asked_of
from torchloom.serve.builder.trace.guard_facts import facts_of
from torchloom.serve.builder.trace.traced_code import codes_of, scopes_of
from torchloom.serve.builder.trace.unguarded import unguarded, why_unstorable
from torchloom.serve.call.arguments import Asked
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.dims import Derived, Dim, Float
from torchloom.serve.contract.specs import NumberSpec, TensorSpec, steps_to
from torchloom.serve.counter import counter
from torchloom.serve.model.code import Codes
from torchloom.serve.model.facts import Facts
from torchloom.serve.model.target import Target, gradient_mode_of

_TORCH = str(Path(torch.__file__).parent)
_GLOBAL_STATE = tuple(
    GuardOn("EQUALS_MATCH", text)
    for text in (
        "torch.get_default_dtype()",
        "torch.are_deterministic_algorithms_enabled()",
        "torch.get_float32_matmul_precision()",
        "utils_device.CURRENT_DEVICE",
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
    facts: Facts
    unwritten: Sequence[str]
    """What it relied on that cannot be written down: its program cannot be stored."""
    codes: Codes
    asked: Asked
    """What it relied on of arguments."""
    assumed: tuple[SizeGuard, ...] = ()
    """What the trace itself assumed of sizes; compiling its graph may add to it."""
    is_unbacked: bool = False
    derived: tuple[Derived, ...] = ()
    """Sizes that follow from those of the box."""
    floats: Mapping[float, Float] = field(default_factory=dict)
    """Arguments that vary, by what they were during the trace."""
    numbers: Mapping[int, int] | None = None
    """The sizes that its graph is to be compiled for, by hint; None where they stay symbols."""

    def verdicts(self, more: Iterable[SizeGuard] = ()) -> list[ProofVerdict]:
        """Judge all that was assumed of sizes so far.

        Args:
            more: what was assumed where an equal graph of another trace was compiled.
        """
        if self.numbers is not None:
            return prove(self.assumed, self.box.dims, self.hints, self.derived)
        guards = self.graph.size_guards()
        known = {guard.text for guard in guards}
        others = {guard.text: guard for guard in more if guard.text not in known}
        return prove(
            [*guards, *others.values()], self.box.dims, self.hints, self.derived, self.floats
        )

    def within(self, part: Box) -> Traced | None:
        """Return this trace as one for a part of its box, if it stands for it.

        It does where the sizes that it saw are of the part, and the same ones vary: what it assumed is then
        judged for the part's sizes alone. It also does for exact sizes for which all holds that it assumed.
        """
        varying = {dim.name for dim in self.box.varying}
        if self.hints in part and {dim.name for dim in part.varying} == varying:
            return replace(self, box=part)
        if part.varying or self.is_unbacked or self.floats:
            return None
        sizes = [size for size in (*part.dims, *self.derived) if size.dim.name in varying]
        numbers = {
            size.of(self.hints[size.dim.name]): size.of(part.largest[size.dim.name])
            for size in sizes
        }
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
    facts, codes, unwritten = _relied_on(target, contract, graph, args)
    return Traced(
        box,
        graph,
        hints,
        facts,
        unwritten,
        codes,
        asked_of(graph.guards, graph.codes, target, contract, args, varying),
        tuple(graph.size_guards()),
        is_unbacked=bool(unbacked),
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


def _relied_on(
    target: Target, contract: Contract, graph: FullGraph, args: Mapping[str, Any]
) -> tuple[Facts, Codes, list[str]]:
    """Return what a trace relied on: facts, code, and what cannot be written down."""
    scope = target.scope(args)
    sources = target.sources_of({name: args[name] for name in args if name in contract.args})
    guards = [*graph.guards, *_GLOBAL_STATE]
    read = _read(guards, scope, graph.modules)
    own = [code for code in graph.codes if not code.co_filename.startswith(_TORCH)]
    kept = {
        source: value
        for source, _, value in _found(guards, scope, graph.modules)
        if not source.startswith(sources)
    }
    # One that is a weight, too, is read by that name alone.
    names = {name for code in own for name in code.co_names}
    tensors = {name: each for name, each in scope["G"].items() if isinstance(each, Tensor)}
    kept |= {f"G[{name!r}]": each for name, each in tensors.items() if name in names}
    guards += list(unguarded(kept.items(), own))
    operators = operators_in(graph.graph_module)
    guards += [GuardOn("OPERATOR", f"torch.ops.{name.replace('::', '.')}") for name in operators]
    hidden = [
        f"what traces of operator {name} run, which is registered for {key}"
        for name in operators
        for key in hidden_kernels(name, is_differentiated=contract.grad == "grad")
    ]
    facts, unwritten = facts_of(*(guards, scope, sources, graph.modules), scopes=scopes_of(read))
    codes, unreached = codes_of(graph.codes, read, sys.modules)
    return facts, codes, [*unwritten, *unreached, *hidden, *why_unstorable(graph.codes)]


def _sources(
    target: Target, contract: Contract, args: Mapping[str, Any], varying: Collection[str] | None
) -> list[str]:
    """Return how a trace calls the whole numbers that vary, or the floats if `varying` is None."""
    by_name = target.sources_by_name(args)
    found: list[str] = []
    for path, spec in contract.numbers():
        if varying is None if spec.size is None else varying and spec.size.dim.name in varying:
            name, _, rest = path.partition(".")
            found += [source + steps_to(contract.args[name], rest) for source in by_name[name]]
    return found


def _read(
    guards: Iterable[GuardOn], scope: Mapping[str, Any], modules: Mapping[str, str]
) -> list[tuple[Place, Any]]:
    """Return what a trace read, with its place; what is served itself first."""
    found: dict[str, tuple[Place, Any]] = {"": ([["call", ""]], scope["call"])}
    for _, place, value in _found(guards, scope, modules):
        found.setdefault(repr(place), (settled(place, scope), value))
    return list(found.values())


def _found(
    guards: Iterable[GuardOn], scope: Mapping[str, Any], modules: Mapping[str, str]
) -> Iterator[tuple[str, Place, Any]]:
    """Yield the expressions of guards that lead somewhere, with place and value."""
    for source in dict.fromkeys(guard.source for guard in guards):
        with suppress(Exception):  # attributes may raise anything; what is not there brings no code
            place = place_of(source, modules)
            if place is not None:
                yield source, place, value_at(place, scope)


_HINTS_OF_TORCH = ("For more", "For extended", "If you suspect", "consider using", "For C++")
"""How lines begin that are about torch's own logs and source."""


def _first_lines(error: BaseException) -> str:
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(_HINTS_OF_TORCH)]
    where = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return "\n".join([*lines[:6], *where[-1:], *multiples_to_promise(str(error))])
