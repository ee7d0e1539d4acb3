"""Families of inputs: from one example of an operator's arguments to many that it should take as well.

    sizes       each size of the example, and all equal ones together, as 0, 1, 2, 3, 5, 8, 13
    layouts     transposed, a slice with an offset, one row for all, channels last
    dtypes      other floating-point types
    sharing     one tensor as two arguments

An operator may refuse some of them: what it refuses is no input of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

SIZES = (0, 1, 2, 3, 5, 8, 13)
"""Empty, one, even, odd, a power of two, a prime beyond a vector's width."""
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "channels_last")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_LARGE = 257
"""Beyond what one vector or one block of most kernels holds."""


@dataclass(frozen=True, kw_only=True)
class TensorLike:
    """A tensor to be made: all but its values, which come from a seed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"
    requires_grad: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    low: float = -2.0
    high: float = 2.0
    """Values lie between these; whole numbers include both."""

    def make(self, generator: torch.Generator) -> Tensor:
        """Return such a tensor."""
        shape = self.shape
        if self.layout == "transposed":
            made = self._values((*shape[:-2], shape[-1], shape[-2]), generator).transpose(-1, -2)
        elif self.layout == "sliced":
            # Beside every row and every column lie values that are no part of the tensor.
            around = tuple(size + 2 for size in shape)
            made = self._values(around, generator)[tuple(slice(1, size + 1) for size in shape)]
        elif self.layout == "expanded":
            made = self._values((1, *shape[1:]), generator).expand(shape)
        elif self.layout == "channels_last":
            made = self._values(shape, generator).contiguous(memory_format=torch.channels_last)
        else:
            made = self._values(shape, generator)
        return made.detach().requires_grad_(self.requires_grad and made.dtype.is_floating_point)

    def _values(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if self.dtype == torch.bool:
            made = torch.randint(0, 2, shape, generator=generator).bool()
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            spread = self.high - self.low
            made = self.low + spread * torch.rand(shape, generator=generator, dtype=torch.float64)
        else:
            made = torch.randint(int(self.low), int(self.high) + 1, shape, generator=generator)
        return made.to(self.dtype).to(self.device)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        text = f"{name}[{', '.join(map(str, self.shape))}]"
        if self.layout != "contiguous":
            text += f" {self.layout}"
        return text + (" requires_grad" if self.requires_grad else "")


@dataclass(frozen=True)
class Sample:
    """Arguments of one call, as they are to be made."""

    args: tuple[Any, ...]
    """Tensors as `TensorLike`, lists of them as tuples; everything else as it is."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    shares: bool = False
    """Equal tensors are one and the same."""
    seed: int = 0

    def make(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments."""
        generator = torch.Generator().manual_seed(self.seed)
        made: dict[TensorLike, Tensor] = {}

        def value(given: Any) -> Any:
            if isinstance(given, TensorLike):
                if self.shares and given in made:
                    return made[given]
                made[given] = given.make(generator)
                return made[given]
            if isinstance(given, tuple) and any(isinstance(each, TensorLike) for each in given):
                return [value(each) for each in given]
            return given

        return [value(each) for each in self.args], {k: value(v) for k, v in self.kwargs.items()}

    @property
    def tensors(self) -> list[TensorLike]:
        """All tensors, in order."""
        return list(_tensors([*self.args, *self.kwargs.values()]))

    def with_tensors(self, tensors: Sequence[TensorLike], **changes: Any) -> Sample:
        """Return this sample with other tensors."""
        waiting = iter(tensors)

        def value(given: Any) -> Any:
            if isinstance(given, TensorLike):
                return next(waiting)
            if isinstance(given, tuple) and any(isinstance(each, TensorLike) for each in given):
                return tuple(value(each) for each in given)
            return given

        args = tuple(value(each) for each in self.args)
        kwargs = {name: value(each) for name, each in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs, **changes)

    def __str__(self) -> str:
        shown = [_shown(each) for each in self.args]
        shown += [f"{name}={_shown(each)}" for name, each in self.kwargs.items()]
        text = ", ".join(shown)
        return f"({text})" + (" one tensor for all equal ones" if self.shares else "")


@dataclass(frozen=True)
class Dims:
    """Sizes of a sample that change together: (number of the tensor, dimension)."""

    places: tuple[tuple[int, int], ...]

    def set(self, sample: Sample, size: int) -> Sample:
        """Return the sample with these sizes set."""
        tensors = sample.tensors
        for number, dim in self.places:
            shape = list(tensors[number].shape)
            shape[dim] = size
            tensors[number] = replace(tensors[number], shape=tuple(shape))
        return sample.with_tensors(tensors)

    def size(self, sample: Sample) -> int:
        """Return their size in a sample."""
        number, dim = self.places[0]
        return sample.tensors[number].shape[dim]


def sample_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Sample:
    """Return the sample that stands for an example's arguments.

    Whole numbers keep their range (they may be indices), floating-point values become signed: what
    an operator does to positive values alone is no reason to trust it.
    """

    def like(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _like(value)
        if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
            return tuple(like(each) for each in value)
        return value

    return Sample(tuple(map(like, args)), {k: like(v) for k, v in (kwargs or {}).items()})


def groups_of(sample: Sample) -> list[Dims]:
    """Return sizes that may have to change together: equal ones of an example.

    Ones of size 1 may broadcast, so each stands alone.
    """
    places: dict[object, list[tuple[int, int]]] = {}
    for number, tensor in enumerate(sample.tensors):
        for dim, size in enumerate(tensor.shape):
            key: object = size if size != 1 else (number, dim)
            places.setdefault(key, []).append((number, dim))
    return [Dims(tuple(each)) for each in places.values()]


def family(sample: Sample, dims: Sequence[Dims], count: int, seed: int = 0) -> Iterator[Sample]:
    """Yield variants of a sample: each change alone first, then random mixtures, `count` at most.

    Args:
        sample: an example.
        dims: sizes that may change, each group on its own.
        count: how many to yield.
        seed: of the mixtures.
    """
    draw = random.Random(seed)
    variants = _each_alone(sample, dims)
    number = 0
    for variant in variants:
        if number >= count:
            return
        yield replace(variant, seed=number)
        number += 1
    while number < count:
        mixed = sample
        for group in dims:
            mixed = group.set(mixed, draw.choice(SIZES))
        mixed = _with_layout(mixed, draw.choice(LAYOUTS), draw) or mixed
        if draw.random() < 0.3:
            mixed = _with_floats(mixed, draw.choice(FLOATS))
        yield replace(mixed, seed=number)
        number += 1


def smaller(sample: Sample, dims: Sequence[Dims]) -> Iterator[Sample]:
    """Yield simpler variants of a sample, the simplest first: for shrinking what fails."""
    plain = [replace(each, layout="contiguous") for each in sample.tensors]
    if plain != sample.tensors:
        yield sample.with_tensors(plain)
    if sample.shares:
        yield replace(sample, shares=False)
    if any(each.dtype in FLOATS and each.dtype != torch.float32 for each in sample.tensors):
        yield _with_floats(sample, torch.float32)
    for group in dims:
        for size in (1, 2, 3, 0):
            if size < group.size(sample):
                yield group.set(sample, size)


def _each_alone(sample: Sample, dims: Sequence[Dims]) -> Iterator[Sample]:
    yield sample
    for group in dims:
        for size in (*SIZES, _LARGE):
            if size != group.size(sample):
                yield group.set(sample, size)
    for layout in LAYOUTS[1:]:
        for number in range(len(sample.tensors)):
            changed = _with_layout(sample, layout, only=number)
            if changed is not None:
                yield changed
    for dtype in FLOATS:
        changed = _with_floats(sample, dtype)
        if changed.tensors != sample.tensors:
            yield changed
    if len(set(sample.tensors)) < len(sample.tensors):
        yield replace(sample, shares=True)


def _with_layout(
    sample: Sample, layout: str, draw: random.Random | None = None, only: int | None = None
) -> Sample | None:
    """Return the sample with another layout of one tensor, or of some; None where none can have it."""
    tensors = sample.tensors
    changed = False
    for number, tensor in enumerate(tensors):
        if only not in (None, number) or (draw is not None and draw.random() < 0.5):
            continue
        if tensor.layout != layout and _can_have(tensor, layout):
            tensors[number] = replace(tensor, layout=layout)
            changed = True
    return sample.with_tensors(tensors) if changed else None


def _can_have(tensor: TensorLike, layout: str) -> bool:
    needed = {"transposed": 2, "sliced": 1, "expanded": 1, "contiguous": 0}
    if layout == "channels_last":
        return len(tensor.shape) == 4
    return len(tensor.shape) >= needed[layout]


def _with_floats(sample: Sample, dtype: torch.dtype) -> Sample:
    """Return the sample with another floating-point type, for all tensors that have one."""
    return sample.with_tensors(
        [replace(each, dtype=dtype) if each.dtype in FLOATS else each for each in sample.tensors]
    )


def _like(tensor: Tensor) -> TensorLike:
    low, high = -2.0, 2.0
    is_whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if is_whole and tensor.dtype != torch.bool and tensor.numel():
        low, high = float(tensor.min()), float(tensor.max())
    return TensorLike(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        device=tensor.device,
        low=low,
        high=high,
    )


def _tensors(values: Sequence[Any]) -> Iterator[TensorLike]:
    for value in values:
        if isinstance(value, TensorLike):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and any(isinstance(each, TensorLike) for each in value):
        return f"[{', '.join(map(str, value))}]"
    return str(value) if isinstance(value, TensorLike) else repr(value)
