"""A program for each bucket: one graph for the sizes that it serves, padded, and tried with hostile padding."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ContractError, ProofError
from torchloom.serve.builder.buckets.padding import check_padding
from torchloom.serve.builder.compare.compare import result_at
from torchloom.serve.builder.compare.differences import parts_of
from torchloom.serve.builder.options import Sizes
from torchloom.serve.builder.proof_errors import why_not_proven
from torchloom.serve.builder.prove import ProofVerdict
from torchloom.serve.builder.trace import Traced, trace
from torchloom.serve.call.padded import Axes, Padded, map_tensors
from torchloom.serve.call.variant import Variant
from torchloom.serve.contract.box import Box, exact_boxes
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.dims import Dim
from torchloom.serve.model.target import Target, gradient_mode_of

_PLAIN = (Tensor, int, float, str, enum.Enum, torch.dtype, torch.device, type(None))
"""What a result may hold in tuples, lists, dicts and dataclasses."""


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
            f"greatest of it: the contract is {contract}, sizes {sizes!r}"
        )
    (dim,) = whole.varying
    axes = _axes(target, contract, dim, without)
    parts = whole.cut(dim.name, [box.largest[dim.name] + 1 for box in boxes])
    trace_for_all = trace(target, contract, whole, without=without)
    for part in parts:
        if part.varying and _failing(trace_for_all, part):
            traced = trace(target, contract, part, without=without)
            if failed := _failing(traced, part):
                raise ProofError(why_not_proven(target, part, failed))
    # Sizes are recorded as they are built: the largest first.
    programs = [program_for(box) for box in reversed(boxes)][::-1]
    for covered, variant in zip(parts, programs, strict=True):
        size = covered.largest[dim.name]
        padded = Padded(variant.run, target, contract, dim, size, axes)
        check_padding(target, contract, padded, covered, without)
        variant.box, variant.run = covered, padded
        variant.stored["padded"] = {"dim": dim.name, "size": size, "axes": axes}
    return programs


def _failing(traced: Traced, box: Box) -> list[ProofVerdict]:
    """Return what a trace assumed that is not true for some sizes of a box, 0 and 1 aside, which trials look at."""
    # torch's own operators ask whether a size is 1, as strides then mean nothing; MultiheadAttention is one.
    (dim,) = box.dims
    return [
        verdict
        for verdict in traced.verdicts()
        if any(1 < sizes.get(dim.name, dim.max) in dim for sizes in verdict.failing)
    ]


def _axes(target: Target, contract: Contract, dim: Dim, without: frozenset[str]) -> Axes:
    """Return where a dim is in each tensor of the model's result, by running it for two sizes."""
    sizes = (max(dim.min, 1), dim.max)
    with gradient_mode_of(contract):
        small, large = (result_at(target, contract, {dim.name: size}, without) for size in sizes)
    if uncut := _uncut_in(large, "result"):
        raise ProofError(
            f"{target.name} cannot be padded: {uncut}, of which padding cannot be cut off. Return tensors in "
            "tuples, lists, dicts or dataclasses, or use shapes='split'"
        )
    found: Axes = {}
    smaller: dict[str, Tensor] = {}
    map_tensors(small, lambda path, tensor: smaller.setdefault(path, tensor))

    def compare(path: str, tensor: Tensor) -> Tensor:
        before = smaller.get(path)
        if before is None or before.dim() != tensor.dim():
            raise ProofError(
                f"result{path} has another rank for other sizes of {dim.name}: it cannot be cut"
            )
        for place, (low, high) in enumerate(zip(before.shape, tensor.shape, strict=True)):
            if low == high:
                continue
            if path in found or low * sizes[1] != high * sizes[0] or low % sizes[0]:
                raise ProofError(
                    f"result{path} has sizes {list(before.shape)} for {dim.name} {sizes[0]}, "
                    f"{list(tensor.shape)} for {sizes[1]}: padding cannot be cut off"
                )
            found[path] = (place, low // sizes[0])
        return tensor

    map_tensors(large, compare)
    return found


def _uncut_in(value: Any, path: str) -> str:
    """Say what in a result is of a kind that `map_tensors` does not look into, "" if nothing."""
    if isinstance(value, _PLAIN):
        return ""
    is_known = isinstance(value, (Mapping, list, tuple)) or dataclasses.is_dataclass(value)
    if not is_known or isinstance(value, type):
        return f"{path} is a {type(value).__name__}"
    found = (_uncut_in(each, f"{path}{name}") for name, each in (parts_of(value) or {}).items())
    return next(filter(None, found), "")
