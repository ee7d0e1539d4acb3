"""What arguments look like: sizes that vary, tensors, and records of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ContractError


@dataclass(frozen=True)
class Dim:
    """A size that varies, both ends included.

    Example:
        >>> Dim("batch", 1, 64)
        Dim('batch', 1, 64)
    """

    name: str
    min: int
    max: int

    def __post_init__(self) -> None:
        """Check the range."""
        if not self.name.isidentifier():
            raise ContractError(f"{self.name!r} is no name of a size: use letters, digits and _")
        if not 0 <= self.min <= self.max:
            raise ContractError(
                f"the size {self.name!r} goes from {self.min} to {self.max}: give 0 <= min <= max"
            )

    def __repr__(self) -> str:
        return f"Dim({self.name!r}, {self.min}, {self.max})"

    def __contains__(self, size: int) -> bool:
        """Say whether a size is allowed."""
        return self.min <= size <= self.max


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument."""

    shape: tuple[Dim | int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    optional: bool = False
    """May be None: then always, or never, for one program."""
    below: int = 2
    """What integers in examples are less than (token ids: the size of the vocabulary)."""
    fill: Callable[[list[int]], Tensor] | None = field(default=None, compare=False)
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
        return [sizes[dim.name] if isinstance(dim, Dim) else dim for dim in self.shape]

    def __str__(self) -> str:
        sizes = ", ".join(d.name if isinstance(d, Dim) else str(d) for d in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


@dataclass(frozen=True)
class RecordSpec:
    """An argument that holds several tensors by name."""

    parts: Mapping[str, TensorSpec | RecordSpec]
    kind: Callable[..., Any] = dict
    """What it is made by, from parts as keyword arguments: dict, or a dataclass."""


def tensor(
    *shape: Dim | int,
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
    """
    for dim in shape:
        if not isinstance(dim, (Dim, int)) or (isinstance(dim, int) and dim < 0):
            raise ContractError(f"{dim!r} is no size: give a Dim or a number")
    return TensorSpec(
        tuple(shape),
        dtype or torch.get_default_dtype(),
        torch.device(device),
        below=below,
        fill=fill,
    )


def maybe(*shape: Dim | int, **like: Any) -> TensorSpec:
    """Return what a tensor argument looks like that may also be None; see `tensor`."""
    return replace(tensor(*shape, **like), optional=True)


def record(kind: Callable[..., Any] = dict, /, **parts: Any) -> RecordSpec:
    """Return what an argument looks like that holds tensors by name, like a dataclass of them.

    Args:
        kind: what makes it of its parts.
        parts: as in `Contract`.
    """
    return RecordSpec({name: spec_of(name, given) for name, given in parts.items()}, kind)


Spec = TensorSpec | RecordSpec | tuple[Any, ...] | Mapping[str, Any]
"""A tensor, sizes alone, or a dict or dataclass of them by name."""


def spec_of(name: str, given: Any) -> TensorSpec | RecordSpec:
    """Return the spec that a user wrote in one of its short forms."""
    if isinstance(given, (TensorSpec, RecordSpec)):
        return given
    if isinstance(given, (tuple, list)):
        return tensor(*given)
    if isinstance(given, Mapping):
        return RecordSpec({key: spec_of(f"{name}.{key}", each) for key, each in given.items()})
    raise ContractError(
        f"{name!r} is described by {given!r}: give sizes like (batch, 16), tensor(...) or maybe(...), "
        "or a dict of these"
    )


def leaves(path: str, spec: TensorSpec | RecordSpec) -> Iterator[tuple[str, TensorSpec]]:
    """Yield each tensor with the path that leads to it."""
    if isinstance(spec, TensorSpec):
        yield path, spec
    else:
        for key, each in spec.parts.items():
            yield from leaves(f"{path}.{key}", each)


def made_of(
    path: str, spec: TensorSpec | RecordSpec, make: Callable[[str, TensorSpec], Any]
) -> Any:
    """Return an argument whose tensors `make` returns for path and spec."""
    if isinstance(spec, TensorSpec):
        return make(path, spec)
    return spec.kind(
        **{key: made_of(f"{path}.{key}", each, make) for key, each in spec.parts.items()}
    )


def spec_to_json(spec: TensorSpec | RecordSpec) -> dict[str, Any]:
    """Return a spec as texts and numbers."""
    if isinstance(spec, RecordSpec):
        kind = f"{spec.kind.__module__}:{spec.kind.__qualname__}"
        return {
            "kind": kind,
            "parts": {key: spec_to_json(each) for key, each in spec.parts.items()},
        }
    return {
        "sizes": [dim.name if isinstance(dim, Dim) else dim for dim in spec.shape],
        "dtype": str(spec.dtype).removeprefix("torch."),
        "device": str(spec.device),
        "optional": spec.optional,
        "below": spec.below,
    }


def spec_from_json(stored: Mapping[str, Any], dims: Mapping[str, Dim]) -> TensorSpec | RecordSpec:
    """Return what `spec_to_json` wrote."""
    if "parts" in stored:
        module, _, name = stored["kind"].partition(":")
        try:
            kind = attrgetter(name)(import_module(module))
        except (ImportError, AttributeError) as error:
            raise ContractError(
                f"the stored contract has an argument of the class {stored['kind']}, which cannot be imported "
                f"({error}): give the contract"
            ) from error
        return RecordSpec(
            {key: spec_from_json(each, dims) for key, each in stored["parts"].items()}, kind
        )
    return TensorSpec(
        tuple(dims[size] if isinstance(size, str) else size for size in stored["sizes"]),
        getattr(torch, stored["dtype"]),
        torch.device(stored["device"]),
        stored["optional"],
        stored["below"],
    )
