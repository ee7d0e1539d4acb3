"""Compare padded programs with the model, run eagerly on the unpadded arguments, whatever is in the padding.

The padding holds the zeros that calls use, NaN, infinity, random values, extremes. Real rows are random, all negative,
all large, all the same: what asks something of all rows answers alike for each of these, and another thing for the
padding. A model passes if none of this changes a result beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from torchloom.errors import ProofError, ServeError
from torchloom.serve.builder.compare.compare import LEFT, differences_at
from torchloom.serve.call.padded import Filling, Padded
from torchloom.serve.contract.box import Box
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
