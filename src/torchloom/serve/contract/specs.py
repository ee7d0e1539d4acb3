"""Descriptions of single arguments: tensors with varying sizes, numbers, and what holds several of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ContractError
from torchloom.serve.contract.dims import Derived, Dim, Float, Size


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument."""

    shape: tuple[Size, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    optional: bool = False
    """May be None: then always, or never, for one program."""
    below: int = 2
    """What integers in examples are less than (token ids: the size of the vocabulary)."""
    fill: Callable[[list[int]], Tensor] | None = field(default=None, compare=False, repr=False)
    """Makes examples of a shape, where random values would not do."""

    def example(self, sizes: Mapping[str, int], seed: int = 0) -> Tensor:
        """Return a tensor of these sizes, filled with random values that suit its dtype."""
        shape = self.sizes(sizes)
        if self.fill is not None:
            return self.fill(shape).to(self.device, self.dtype)
        draw = torch.Generator().manual_seed(seed)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            made = torch.randn(shape, generator=draw, dtype=torch.float32)
        else:
            made = torch.randint(0, self.below, shape, generator=draw)
        return made.to(self.device, self.dtype)

    def empty(self, sizes: Mapping[str, int]) -> Tensor:
        """Return a tensor of these sizes with no particular content."""
        return torch.empty(self.sizes(sizes), dtype=self.dtype, device=self.device)

    def sizes(self, sizes: Mapping[str, int]) -> list[int]:
        """Return its shape for given varying sizes."""
        return [
            each if isinstance(each, int) else each.of(sizes[each.dim.name]) for each in self.shape
        ]

    def words(self) -> str:
        """Return all of it but how examples are filled."""
        return repr(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "fill": None}

    def __str__(self) -> str:
        sizes = ", ".join(str(d) if isinstance(d, int) else d.text for d in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


@dataclass(frozen=True)
class NumberSpec:
    """A number that varies: a whole one, as sizes do, or a float between two ends."""

    size: Dim | Derived | None = None
    """Whole numbers; None for floats."""
    low: float = 0.0
    high: float = 0.0

    def value(self, path: str, known: Mapping[str, Any]) -> int | float:
        """Return the number where sizes are known; a float that is not among them lies within its range."""
        if self.size is not None:
            return self.size.of(known[self.size.dim.name])
        return known.get(path, Float(path, self.low, self.high).hint)

    def words(self) -> str:
        """Return all of it."""
        return repr(self)

    def __str__(self) -> str:
        return f"float {self.low} to {self.high}" if self.size is None else f"int {self.size.text}"


@dataclass(frozen=True)
class RecordSpec:
    """An argument that holds several tensors, by name or in order."""

    parts: Mapping[str, AnySpec]
    """By name; those of a list or tuple by place: "0", "1"."""
    kind: Callable[..., Any] = dict
    """What it is made by: dict or a dataclass, from parts as keyword arguments; list or tuple."""

    @property
    def is_ordered(self) -> bool:
        """Whether parts are found by place."""
        return self.kind in (list, tuple)

    def words(self) -> str:
        """Return what holds the parts."""
        return f"{self.kind.__module__}.{self.kind.__qualname__}"

    def step(self, key: str) -> str:
        """Return the Python that leads to a part: `[0]`, `['key']` or `.field`."""
        if self.is_ordered:
            return f"[{key}]"
        return f"[{key!r}]" if self.kind is dict else f".{key}"


def tensor(
    *shape: Size,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    below: int = 2,
    fill: Callable[[list[int]], Tensor] | None = None,
) -> TensorSpec:
    """Return what a tensor argument looks like; it is contiguous.

    Args:
        shape: sizes, some of which vary.
        dtype: torch's default dtype if left out.
        device: where it is.
        below: what integers in examples are less than, for token ids the size of the vocabulary.
        fill: makes examples of a shape, where random values would not do: `lambda shape:
            torch.arange(shape[0])` for rows that have to differ.

    Raises:
        ContractError: a size is no size, or may be negative.
    """
    for size in shape:
        if not isinstance(size, (Dim, Derived, int)):
            raise ContractError(f"{size!r} is no size: give a Dim or a number")
        least = size if isinstance(size, int) else size.of(size.dim.min)
        if least < 0:
            raise ContractError(f"{size!r} is no size: it may be {least}")
    return TensorSpec(
        tuple(shape),
        dtype or torch.get_default_dtype(),
        torch.device(device),
        below=below,
        fill=fill,
    )


def maybe(*shape: Size, **like: Any) -> TensorSpec:
    """Return what a tensor argument looks like that may also be None; see `tensor`."""
    return replace(tensor(*shape, **like), optional=True)


def number(low: float, high: float) -> NumberSpec:
    """Return what an argument looks like that is a float between two ends, both included.

    Whole numbers that vary are given as a `Dim`.

    Args:
        low: the least.
        high: the greatest.

    Raises:
        ContractError: they are no two finite floats.

    Example:
        >>> Contract({"x": tensor(Dim("batch", 1, 64), 16), "temperature": number(0.1, 2.0)})
        Contract(x: float32[batch, 16], temperature: float 0.1 to 2.0; batch 1 to 64)
    """
    if not all(type(each) is float and math.isfinite(each) for each in (low, high)) or low >= high:
        raise ContractError(
            f"a float varies between {low!r} and {high!r}: give two floats, the smaller one first; whole "
            "numbers are given as a Dim"
        )
    return NumberSpec(None, low, high)


def record(kind: Callable[..., Any] = dict, /, **parts: Any) -> RecordSpec:
    """Return what an argument looks like that holds tensors by name, like a dataclass of them.

    Args:
        kind: what makes it of its parts.
        parts: as in `Contract`.
    """
    return RecordSpec({name: spec_of(name, given) for name, given in parts.items()}, kind)


AnySpec = TensorSpec | NumberSpec | RecordSpec
Spec = AnySpec | Dim | Derived | tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""A tensor, sizes alone, a number, or a dict, dataclass, list or tuple of them."""


def spec_of(name: str, given: Any) -> AnySpec:
    """Return the spec that a user wrote in one of its short forms.

    Raises:
        ContractError: it is none of them.
    """
    if isinstance(given, _SPECS):
        return given
    if isinstance(given, (Dim, Derived)):
        return NumberSpec(given)
    if isinstance(given, (tuple, list)):
        if any(isinstance(each, (*_SPECS, tuple, list, Mapping)) for each in given):
            parts = {str(i): spec_of(f"{name}.{i}", each) for i, each in enumerate(given)}
            return RecordSpec(parts, type(given))
        return tensor(*given)
    if isinstance(given, Mapping):
        if others := [key for key in given if type(key) is not str]:
            raise ContractError(f"{name!r} has the key {others[0]!r}: keys in contracts are texts")
        return RecordSpec({key: spec_of(f"{name}.{key}", each) for key, each in given.items()})
    raise ContractError(
        f"{name!r} is described by {given!r}: give sizes like (batch, 16), tensor(...) or maybe(...), "
        "or a dict, list or tuple of these"
    )


_SPECS = (TensorSpec, NumberSpec, RecordSpec)


def within(path: str, code: str, spec: AnySpec) -> Iterator[tuple[str, str, AnySpec]]:
    """Yield an argument and all that it holds: the path that leads there, the same as Python, and the spec."""
    yield path, code, spec
    if isinstance(spec, RecordSpec):
        for key, each in spec.parts.items():
            yield from within(f"{path}.{key}", f"{code}{spec.step(key)}", each)


def made_of(path: str, spec: AnySpec, make: Callable[[str, TensorSpec | NumberSpec], Any]) -> Any:
    """Return an argument whose tensors and numbers `make` returns for path and spec.

    Args:
        path: to the argument.
        spec: what it looks like.
        make: makes a tensor or number.
    """
    if not isinstance(spec, RecordSpec):
        return make(path, spec)
    parts = {key: made_of(f"{path}.{key}", each, make) for key, each in spec.parts.items()}
    return spec.kind(parts.values()) if spec.is_ordered else spec.kind(**parts)
