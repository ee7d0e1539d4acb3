"""Calls of an operator, made from one example: other sizes, layouts and dtypes, and one tensor as two arguments.

An operator may refuse some of them: what it refuses is no input of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIZES = (0, 1, 2, 3, 5, 8, 13, 257)
"""Empty, one, even, odd, a power of two, a prime beyond a vector's width, more than one block of most kernels."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_LAYOUT_DIMS = {"transposed": 2, "sliced": 1, "expanded": 1, "channels last": 4}
"""Layouts, and the dimensions that a tensor needs for each."""


@dataclass(frozen=True)
class OperatorCall:
    """Arguments of one call."""

    args: list[Any]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in order."""
        return tensors_in([self.args, list(self.kwargs.values())])

    def with_tensors(self, tensors: Sequence[Tensor]) -> OperatorCall:
        """Return this call with other tensors."""
        waiting = iter(tensors)

        def value(given: Any) -> Any:
            if isinstance(given, (list, tuple)):
                return [value(each) for each in given]
            return next(waiting) if isinstance(given, Tensor) else given

        return OperatorCall(
            value(self.args), {name: value(each) for name, each in self.kwargs.items()}
        )

    def __str__(self) -> str:
        shown = [*map(_shown, self.args), *(f"{k}={_shown(v)}" for k, v in self.kwargs.items())]
        tensors = self.tensors
        is_shared = len({id(each) for each in tensors}) < len(tensors)
        return f"({', '.join(shown)})" + (" one tensor for all equal ones" if is_shared else "")


def call_of(sample: Sequence[Any] | Mapping[str, Any]) -> OperatorCall:
    """Return the call of a sample, a tuple or a dict of keyword arguments, on copies of its tensors."""
    is_named = isinstance(sample, Mapping)
    call = OperatorCall([], dict(sample)) if is_named else OperatorCall(list(sample), {})
    return call.with_tensors(
        [each.detach().clone().requires_grad_(each.requires_grad) for each in call.tensors]
    )


def calls_like(example: OperatorCall) -> Iterator[OperatorCall]:
    """Yield calls like an example with values of their own: those with one change first, then with two.

    Whole numbers keep their range (they may be indices), floating-point values become signed: what an
    operator does to positive values alone is no reason to trust it.
    """
    tensors = example.tensors
    places: dict[int, list[tuple[int, int]]] = {}
    for number, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape):
            places.setdefault(size, []).append((number, dim))
    alone = [[place] for each in places.values() for place in each]
    together = [each for size, each in places.items() if len(each) > 1 and size != 1]
    tied = {place for group in together for place in group}
    sizes: list[dict[tuple[int, int], int]] = [{}]
    for group in (*alone, *together):
        # One of equal sizes that becomes 1 would broadcast, which is another call than the example's.
        broadcasts = len(group) == 1 and group[0] in tied
        sizes += [dict.fromkeys(group, size) for size in SIZES if not (broadcasts and size == 1)]
    layouts = ["", *_LAYOUT_DIMS]
    dtypes = [None, *FLOATS]
    choices = itertools.product(range(len(sizes)), range(len(layouts)), range(len(dtypes)), (0, 1))
    ordered = sorted(choices, key=lambda at: sum(map(bool, at)))
    seen: set[tuple[Any, ...]] = set()
    for size, layout, dtype, is_shared in ordered:
        call = _made(example, sizes[size], layouts[layout], dtypes[dtype], bool(is_shared))
        key = (bool(is_shared), *((t.shape, t.stride(), t.dtype) for t in call.tensors))
        changes_nothing = is_shared and len({id(each) for each in call.tensors}) == len(tensors)
        if key not in seen and not changes_nothing:
            seen.add(key)
            yield call


def _made(
    example: OperatorCall,
    sizes: Mapping[tuple[int, int], int],
    layout: str,
    dtype: torch.dtype | None,
    is_shared: bool,
) -> OperatorCall:
    generator = torch.Generator().manual_seed(len(sizes) + sum(sizes.values()))
    made: list[Tensor] = []
    for number, like in enumerate(example.tensors):
        shape = tuple(sizes.get((number, dim), size) for dim, size in enumerate(like.shape))
        kind = dtype if dtype is not None and like.dtype in FLOATS else like.dtype
        twin = next((t for t in made if is_shared and (t.shape, t.dtype) == (shape, kind)), None)
        made.append(_fresh(like, shape, layout, kind, generator) if twin is None else twin)
    return example.with_tensors(made)


def _fresh(
    like: Tensor,
    shape: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    def values(*sizes: int) -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            made = 4 * torch.rand(sizes, generator=generator, dtype=torch.float64) - 2
        else:
            low, high = (int(like.min()), int(like.max())) if like.numel() else (0, 1)
            made = torch.randint(low, high + 1, sizes, generator=generator)
        return made.to(dtype).to(like.device)

    if len(shape) < _LAYOUT_DIMS.get(layout, 0):
        layout = ""
    if layout == "transposed":
        made = values(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    elif (
        layout == "sliced"
    ):  # values that are no part of the tensor lie beside every row and column
        made = values(*(size + 2 for size in shape))[tuple(slice(1, size + 1) for size in shape)]
    elif layout == "expanded":
        made = values(1, *shape[1:]).expand(shape)
    elif layout == "channels last" and len(shape) == 4:
        made = values(*shape).contiguous(memory_format=torch.channels_last)
    else:
        made = values(*shape)
    return made.detach().requires_grad_(like.requires_grad and dtype.is_floating_point)


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested lists and tuples, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for each in values for tensor in tensors_in(each)]
    return []


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if not isinstance(value, Tensor):
        return repr(value)
    text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return text if value.is_contiguous() else f"{text} with strides {list(value.stride())}"
