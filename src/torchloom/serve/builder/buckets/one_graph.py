"""Is the model the same graph for all sizes that a bucket serves?

What a trace assumed has to hold for all of them. Where it does not, the other sizes are traced too: if their graph is
the same, the assumption decided nothing (strides of a convolution that nobody reads, for one).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from torchloom.bytecode import code_digest
from torchloom.errors import ProofError, ServeError
from torchloom.pieces.symbols import with_numbers
from torchloom.serve.builder.proof_errors import why_not_proven
from torchloom.serve.builder.prove import cuts
from torchloom.serve.builder.trace import Traced, trace
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.target import Target

_MOST_PARTS = 8


def trace_for_all_sizes(
    target: Target,
    contract: Contract,
    box: Box,
    without: frozenset[str],
    known: list[Traced],
) -> tuple[Traced | None, tuple[int, ...]]:
    """Return a trace that stands for all sizes of a box, and sizes that are to be tried.

    The trace is None for a box of one size.

    Args:
        target: the model.
        contract: what arguments look like.
        box: of one dim.
        without: paths of optional tensors that are None.
        known: traces that are there; new ones are added.

    Raises:
        ProofError: the model decides by size; the text names line and sizes.
        ServeError: it is not one graph.
    """
    if not box.varying:
        return None, ()
    whole = Box.of(contract.dims.values())
    if not known:
        known.append(trace(target, contract, whole, without=without))
    for each in known:
        if _holds(each, box):
            return each, ()
    made = trace(target, contract, box, without=without)
    known.append(made)
    failed = [verdict for verdict in made.verdicts() if not verdict.holds]
    if not failed:
        return made, ()
    (dim,) = box.varying
    (chosen,) = made.hints.values()
    parts = box.cut(dim.name, cuts(failed, dim))
    rest = [part for part in parts if made.hints not in part]
    is_one = len(parts) <= _MOST_PARTS and all(
        _is_same_in(target, contract, part, without, made) for part in rest
    )
    if not is_one or chosen != dim.max:
        raise ProofError(why_not_proven(target, box, failed))
    return made, tuple(part.largest[dim.name] for part in rest if not part.varying)


def _holds(traced: Traced, box: Box) -> bool:
    """Say whether all that a trace assumed holds for a box inside its own."""
    (dim,) = box.varying
    (own,) = traced.box.varying
    hint = traced.hints[own.name]
    if dim.min < own.min or dim.max > own.max:
        return False
    return all(
        guard.holds({**{each: each for each in guard.hints}, hint: size})
        for guard in traced.assumed
        for size in dim.sizes
    )


def _is_same_in(
    target: Target, contract: Contract, part: Box, without: frozenset[str], other: Traced
) -> bool:
    """Say whether the graph of a part of a box is that of another part."""
    try:
        made = trace(target, contract, part, without=without)
    except ServeError:
        return False
    if any(not verdict.holds for verdict in made.verdicts()):
        return False
    (dim,) = part.dims
    ends = {dim.min, dim.max}
    # Code around a graph hands it the sizes that vary. What it returns for a size alone is tried (`check_padding`).
    return (not part.varying or _code(made) == _code(other)) and all(
        _steps(made, size) == _steps(other, size) for size in ends
    )


def _code(traced: Traced) -> str:
    """Return a hash of the code around a graph, in which each graph has a name of its own."""
    shell = traced.graph.shell
    code = shell.code
    names = tuple("graph" if name == shell.backend_id else name for name in code.co_names)
    return code_digest(code.replace(co_names=names))


def _steps(traced: Traced, size: int) -> list[str]:
    """Return what a graph does for one size, as texts."""
    numbers = _numbers(traced, size)
    places: dict[fx.Node, str] = {}

    def shown(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return numbers[value] if value in numbers else places.get(value, value.name)
        return value

    found = []
    for node in traced.graph.graph_module.graph.nodes:
        if node in numbers:
            continue
        if node.op in ("placeholder", "get_attr"):
            places[node] = str(node.target)
            continue
        places[node] = f"%{len(found)}"
        name = getattr(node.target, "__name__", None) or str(node.target)
        given = map_aggregate((node.args, dict(node.kwargs)), shown)
        found.append(f"{node.op} {name} {given}")
    return found


def _numbers(traced: Traced, size: int) -> Mapping[fx.Node, Any]:
    """Return what each size in a graph is, and each tuple of sizes."""
    sizes = {traced.hints[dim.name]: size for dim in traced.box.varying}
    found: dict[fx.Node, Any] = {}
    for node in traced.graph.graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Size):
            found[node] = tuple(with_numbers(list(value), traced.graph.env, sizes)[1])
        elif isinstance(value, (int, torch.SymInt)):
            (found[node],) = with_numbers([value], traced.graph.env, sizes)[1]
    return found
