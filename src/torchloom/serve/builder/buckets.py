"""Builds a program for each bucket, a size that serves smaller calls padded, and tries it with hostile padding.

The padding holds the zeros that calls use, NaN, infinity, random values, extremes. Real rows are random, all negative,
all large, all the same: what asks something of all rows answers alike for each of these, and another thing for the
padding. A model passes if none of this changes a result beyond rounding. These are trials: see "A bucket" in
docs/serving.md for what they do not see.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ContractError, ProofError, ServeError
from torchloom.serve.builder.compare.compare import LEFT, differences_at, result_at
from torchloom.serve.builder.compare.differences import parts_of
from torchloom.serve.builder.options import Sizes
from torchloom.serve.builder.prove import ProofVerdict, why_not_proven
from torchloom.serve.builder.trace import Traced, trace
from torchloom.serve.call.padded import Axes, Filling, Padded, map_tensors
from torchloom.serve.call.variant import Variant
from torchloom.serve.contract.box import Box, exact_boxes
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.dims import Dim
from torchloom.serve.contract.specs import TensorSpec
from torchloom.serve.model.target import Target, gradient_mode_of

Values = Callable[[TensorSpec, Tensor], Tensor]
_MOST_SIZES = 16
"""Sizes of a bucket that are all tried; of more, the ends, powers of two, and primes."""


def _all(number: float, spec: TensorSpec, shape: list[int], like: Tensor) -> Tensor:
    """Return one number everywhere; of integers, the least or the greatest that is allowed."""
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return like.new_full(shape, number)
    return like.new_full(shape, 0 if number <= 0 else max(spec.below - 1, 0))


def _random(spec: TensorSpec, shape: list[int], like: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(len(shape) + shape[0])
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return (3 * torch.randn(shape, generator=draw)).to(like.device, like.dtype)
    return torch.randint(0, max(spec.below, 1), shape, generator=draw).to(like.device, like.dtype)


def _copies(spec: TensorSpec, shape: list[int], like: Tensor) -> Tensor:
    """Return copies of the first row, as far as there is one: what compares or counts rows sees them."""
    place = next((dim for dim, size in enumerate(shape) if size != like.shape[dim]), None)
    if place is None or not like.shape[place]:
        return _random(spec, shape, like) if place is not None else like.clone()
    return like.narrow(place, 0, 1).expand(shape)


_FILLINGS: Mapping[str, Filling] = {
    "zeros, as in calls": partial(_all, 0),
    "NaN": partial(_all, torch.nan),
    "random values": _random,
    "copies of a row": _copies,
    "infinity": partial(_all, torch.inf),
    "large values": partial(_all, 1e4),
    "large negative values": partial(_all, -1e4),
}


def _large(sign: int, spec: TensorSpec, made: Tensor) -> Tensor:
    if made.dtype.is_floating_point:
        return sign * (10 + 10 * made.abs())
    return _all(sign, spec, [*made.shape], made)


def _alike(spec: TensorSpec, made: Tensor) -> Tensor:
    """Return rows that are all the same, of values that are far apart."""
    first = made[:1] if made.dim() else made
    return (first * (30 if made.dtype.is_floating_point else 1)).expand_as(made).contiguous()


_VALUES: tuple[Values | None, ...] = (None, partial(_large, -1), partial(_large, 1), _alike)


def check_padding(
    target: Target,
    contract: Contract,
    padded: Padded,
    box: Box,
    without: frozenset[str],
) -> None:
    """Refuse a padded program whose results depend on what is in the padding.

    Args:
        target: the model.
        contract: what arguments look like.
        padded: a program for a bucket.
        box: the sizes that it serves.
        without: paths of optional tensors that are None.

    Raises:
        ProofError: they do; names size, padding and result.
    """
    for sizes, values, (name, filling) in _trials(box, padded.size):
        padded.filling = filling
        try:
            with gradient_mode_of(contract):
                found = differences_at(target, contract, padded, sizes, without, values)
        except ServeError:
            if values is None:
                raise
            continue  # values that the model does not take say nothing of padding
        finally:
            padded.filling = None
        if found is None:
            continue
        shown = ", ".join(f"{dim} {size}" for dim, size in sizes.items())
        hint = (
            "what forward leaves in attributes and containers is not cut, so return it"
            if found.path.startswith(LEFT)
            else "let no row depend on another, or on how many there are"
        )
        raise ProofError(
            f"{target.name} cannot be padded to {padded.size}, because at {shown}, with {name} in the padding, {found}: "
            f"{hint}, or use shapes='split'"
        )


def _trials(
    box: Box, size: int
) -> Iterator[tuple[dict[str, int], Values | None, tuple[str, Filling]]]:
    """Yield sizes, kinds of real rows, and paddings: each of them at the ends, and the first ones at other sizes."""
    (dim,) = box.dims
    ends = {*dim.sizes[:2], dim.sizes[len(dim.sizes) // 2], *dim.sizes[-2:-1]}
    fillings = list(_FILLINGS.items())
    for number in sorted({*ends, *_chosen(dim)} - {size}):
        for values in _VALUES if number in ends else _VALUES[:1]:
            is_thorough = number in ends and values is None
            for filling in fillings if is_thorough else fillings[:2]:
                yield {dim.name: number}, values, filling


def _chosen(dim: Dim) -> Iterable[int]:
    """Return the sizes of a bucket that are tried: all if they are few."""
    sizes = dim.sizes
    if len(sizes) <= _MOST_SIZES:
        return sizes
    special = [
        n for n in sizes if n & (n - 1) == 0 or all(n % d for d in range(2, int(n**0.5) + 1))
    ]
    return special[:: -(-len(special) // _MOST_SIZES)]


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
