"""A program for each bucket: one graph for the sizes that it serves, padded, and tried with hostile padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from torchloom.errors import ContractError, ProofError, ServeError
from torchloom.pieces.symbols import with_numbers
from torchloom.serve.builder.buckets.axes import axes_of, uncut_in
from torchloom.serve.builder.buckets.padding import check_padding
from torchloom.serve.builder.compare.compare import result_at
from torchloom.serve.builder.options import Sizes
from torchloom.serve.builder.proof_errors import why_not_proven
from torchloom.serve.builder.prove import ProofVerdict, cuts
from torchloom.serve.builder.trace import Traced, trace
from torchloom.serve.call.padded import Axes, Padded
from torchloom.serve.call.variant import Variant
from torchloom.serve.contract.box import Box, exact_boxes
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.dims import Dim
from torchloom.serve.model.target import Target, gradient_mode_of

_MOST_PARTS = 8
"""Ranges of sizes of one bucket that are traced apart: beyond, the model is taken to decide by size."""


def bucket_programs(
    target: Target,
    contract: Contract,
    sizes: Sizes,
    without: frozenset[str],
    program_for: Callable[[Box], Variant],
) -> list[Variant]:
    """Return a program for each size that serves the sizes below it too, down to the one before.

    Args:
        target: the model.
        contract: what arguments look like.
        sizes: of the buckets.
        without: paths of optional tensors that are None.
        program_for: builds the program for a box of one size.

    Raises:
        ContractError: several sizes vary, or the greatest has no bucket.
        ProofError: the model decides by size, padding reaches a result, or results cannot be cut.
    """
    boxes = exact_boxes(contract, sizes)
    whole = Box.of(contract.dims.values())
    others = [*contract.derived, *contract.numbers()]
    simple = len(whole.varying) == 1 and not others
    if not simple or not boxes or boxes[-1].largest != whole.largest:
        raise ContractError(
            "shapes='bucket' takes one varying size, that no other size or number follows, and `sizes` up to the "
            f"greatest of it: the contract "
            f"is {contract}, sizes {sizes!r}"
        )
    (dim,) = whole.varying
    axes = _axes(target, contract, dim, without)
    parts = whole.cut(dim.name, [box.largest[dim.name] + 1 for box in boxes])
    trace_for_all = trace(target, contract, whole, without=without)
    tried = [_sizes_apart(target, contract, part, trace_for_all, without) for part in parts]
    # Sizes are recorded as they are built: the largest first.
    programs = [program_for(box) for box in reversed(boxes)][::-1]
    for covered, also, variant in zip(parts, tried, programs, strict=True):
        size = covered.largest[dim.name]
        padded = Padded(variant.run, target, contract, dim, size, axes)
        check_padding(target, contract, padded, covered, without, also)
        variant.box, variant.run = covered, padded
        variant.stored["padded"] = {"dim": dim.name, "size": size, "axes": axes}
    return programs


def _axes(target: Target, contract: Contract, dim: Dim, without: frozenset[str]) -> Axes:
    """Find a dim in the model's result by running it for two sizes."""
    sizes = (max(dim.min, 1), dim.max)
    with gradient_mode_of(contract):
        small, large = (result_at(target, contract, {dim.name: size}, without) for size in sizes)
    if uncut := uncut_in(large):
        raise ProofError(
            f"{target.name} cannot be padded: {uncut}, of which padding cannot be cut off. Return tensors in "
            "tuples, lists, dicts or dataclasses, or use shapes='split'"
        )
    return axes_of(small, large, sizes, dim.name)


def _sizes_apart(
    target: Target, contract: Contract, box: Box, whole: Traced, without: frozenset[str]
) -> list[int]:
    """Return sizes of a bucket that are to be tried because a trace of its largest assumed what is not true there.

    Convolutions choose layouts by size, which nobody reads: the operators are the same. Others are refused.

    Raises:
        ProofError: the model decides by size; the text names line and sizes.
    """
    if not box.varying or not _failing(whole, box):
        return []
    (dim,) = box.varying
    traced = trace(target, contract, box, without=without)
    failed = _failing(traced, box)
    parts = box.cut(dim.name, cuts(failed, dim))
    apart = [part for part in parts if traced.hints not in part]
    is_one = len(parts) <= _MOST_PARTS and (not failed or len(parts) > 1)
    if not is_one or any(
        not _is_same_in(target, contract, part, without, traced) for part in apart
    ):
        raise ProofError(why_not_proven(target, box, failed))
    return [size for part in apart for each in part.dims for size in (each.min, each.max)]


def _failing(traced: Traced, box: Box) -> list[ProofVerdict]:
    """Return what a trace assumed that is not true for some sizes of a box."""
    (dim,) = box.dims
    return [
        verdict
        for verdict in traced.verdicts()
        if any(sizes.get(dim.name, dim.max) in dim for sizes in verdict.failing)
    ]


def _is_same_in(
    target: Target, contract: Contract, part: Box, without: frozenset[str], other: Traced
) -> bool:
    """Say whether the graph of a part of a bucket is that of its largest size."""
    try:
        made = trace(target, contract, part, without=without)
    except ServeError:
        return False
    (dim,) = part.dims
    return not _failing(made, part) and all(
        _steps(made, size) == _steps(other, size) for size in (dim.min, dim.max)
    )


def _steps(traced: Traced, size: int) -> list[str]:
    """Return what a graph does for one size, as texts."""
    sizes = {traced.hints[dim.name]: size for dim in traced.box.varying}
    shown: dict[fx.Node, Any] = {}
    found: list[str] = []
    modules = traced.graph.graph_module.modules()
    for node in (
        n for each in modules if isinstance(each, fx.GraphModule) for n in each.graph.nodes
    ):
        value = node.meta.get("example_value")
        if isinstance(value, (int, torch.SymInt, torch.Size)):
            several = list(value) if isinstance(value, torch.Size) else [value]
            numbers = tuple(with_numbers(several, traced.graph.env, sizes)[1])
            shown[node] = numbers if isinstance(value, torch.Size) else numbers[0]
        elif node.op.startswith("call"):
            shown[node] = f"%{len(found)}"
            given = map_arg((node.args, node.kwargs), lambda each: shown.get(each, each))
            found.append(f"{node.target} {given}")
        else:
            shown[node] = str(node.target)
    return found
