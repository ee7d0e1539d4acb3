"""What a served model promises about its inputs: which sizes vary, how far, and what is fixed.

    Contract({"ids": tensor(B, S, dtype=torch.int64), "mask": maybe(B, S)}, fixed={"causal": True})

A contract is read twice: when a program is built (examples of any size are made of it) and at each call
(a few comparisons take the place of a compiler's guards).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from torchloom.errors import ContractError

Gradient = Literal["inference", "no_grad", "grad"]


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

    def example(self, sizes: Mapping[str, int]) -> Tensor:
        """Return a tensor of these sizes, filled with what suits its dtype (zeros and ones)."""
        shape = [sizes[d.name] if isinstance(d, Dim) else d for d in self.shape]
        if self.dtype.is_floating_point:
            generator = torch.Generator().manual_seed(0)
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        sizes = ", ".join(d.name if isinstance(d, Dim) else str(d) for d in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


def tensor(
    *shape: Dim | int, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> TensorSpec:
    """Return what a tensor argument looks like.

    Args:
        shape: sizes, some of which vary.
        dtype: torch's default dtype if left out.
        device: where it is.
    """
    for dim in shape:
        if not isinstance(dim, (Dim, int)) or (isinstance(dim, int) and dim < 0):
            raise ContractError(f"{dim!r} is no size: give a Dim or a number")
    return TensorSpec(tuple(shape), dtype or torch.get_default_dtype(), torch.device(device))


def maybe(
    *shape: Dim | int, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> TensorSpec:
    """Return what a tensor argument looks like that may also be None; see `tensor`."""
    return replace(tensor(*shape, dtype=dtype, device=device), optional=True)


Spec = TensorSpec | tuple[Any, ...] | Mapping[str, Any]
"""A tensor, sizes alone, or a dict or dataclass of them by name."""


class Contract:
    """The promise.

    Args:
        args: what each tensor argument looks like, by name: `tensor(B, 16)`, or `(B, 16)` for the
            default dtype, or a dict of these for an argument that is a dict or dataclass of tensors.
        fixed: other arguments, with the one value that they have at every call.
        grad: "inference" (under `torch.inference_mode`), "no_grad", or "grad".
        training: whether modules are in training mode.

    Raises:
        ContractError: one name stands for two ranges, or an entry is no size, tensor or dict.

    Example:
        >>> batch = Dim("batch", 1, 64)
        >>> contract = Contract({"x": (batch, 16)})
        >>> contract.sizes_of({"x": torch.zeros(5, 16)})
        {'batch': 5}
        >>> contract.sizes_of({"x": torch.zeros(65, 16)})
        Traceback (most recent call last):
            ...
        torchloom.errors.ContractError: size 0 of 'x' (batch) is 65, the contract allows 1 to 64
    """

    def __init__(
        self,
        args: Mapping[str, Spec],
        *,
        fixed: Mapping[str, Any] | None = None,
        grad: Gradient = "no_grad",
        training: bool = False,
    ) -> None:
        self.args = {name: _spec(name, given) for name, given in args.items()}
        self.fixed = dict(fixed or {})
        self.grad, self.training = grad, training
        if grad not in ("inference", "no_grad", "grad"):
            raise ContractError(f"grad is 'inference', 'no_grad' or 'grad', not {grad!r}")
        both = self.args.keys() & self.fixed.keys()
        if both:
            raise ContractError(f"{min(both)!r} is both a tensor argument and fixed")
        self.dims: dict[str, Dim] = {}
        for _, spec in self.tensors():
            for dim in spec.shape:
                if isinstance(dim, Dim) and self.dims.setdefault(dim.name, dim) != dim:
                    raise ContractError(
                        f"{dim.name!r} stands for two ranges, {self.dims[dim.name].min} to "
                        f"{self.dims[dim.name].max} and {dim.min} to {dim.max}: use two names"
                    )

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield each tensor with the path that leads to it."""
        for name, spec in self.args.items():
            yield from _leaves(name, spec)

    def sizes_of(self, args: Mapping[str, Any]) -> dict[str, int]:
        """Return the varying sizes of a call's arguments.

        Raises:
            ContractError: the call breaks the contract; the text names argument, size and range.
        """
        sizes: dict[str, int] = {}
        given = {path: _at(args, path) for path, _ in self.tensors()}
        for path, spec in self.tensors():
            value = given[path]
            if value is None and spec.optional:
                continue
            _check_tensor(path, value, spec)
            for number, (size, dim) in enumerate(zip(value.shape, spec.shape, strict=True)):
                _check_size(path, number, size, dim, sizes)
        for name, wanted in self.fixed.items():
            if name in args and not _same(args[name], wanted):
                raise ContractError(
                    f"{name!r} is {args[name]!r}, the contract fixes it to {wanted!r}"
                )
        return sizes

    def example(self, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return arguments of the given sizes, the largest by default."""
        known = {name: dim.max for name, dim in self.dims.items()} | dict(sizes or {})
        made = {name: _example(spec, known) for name, spec in self.args.items()}
        return {**made, **self.fixed}

    def corners(self) -> list[dict[str, int]]:
        """Return sizes at which operators behave in ways of their own: the ends, 0, 1, 2 and beyond."""
        choices = {}
        for name, dim in self.dims.items():
            middle = (dim.min + dim.max) // 2
            wanted = {dim.min, dim.min + 1, 0, 1, 2, 3, middle, dim.max - 1, dim.max}
            choices[name] = sorted(size for size in wanted if size in dim)
        rows = [dict(zip(choices, row, strict=True)) for row in _rows(list(choices.values()))]
        return rows or [{}]

    def __repr__(self) -> str:
        shown = [f"{path}: {spec}" for path, spec in self.tensors()]
        shown += [f"{name} = {value!r}" for name, value in self.fixed.items()]
        ranges = [f"{d.name} {d.min}..{d.max}" for d in self.dims.values()]
        return f"Contract({', '.join(shown)}; {', '.join(ranges) or 'nothing varies'})"


def _rows(choices: list[list[int]], most: int = 64) -> Iterator[tuple[int, ...]]:
    """Yield all combinations where they are few, else each choice with the others at both ends."""
    count = 1
    for each in choices:
        count *= len(each)
    if count <= most:
        yield from itertools.product(*choices)
        return
    for others in (0, -1):
        for at, each in enumerate(choices):
            for size in each:
                row = [choice[others] for choice in choices]
                row[at] = size
                yield tuple(row)


def _spec(name: str, given: Any) -> TensorSpec | dict[str, Any]:
    if isinstance(given, TensorSpec):
        return given
    if isinstance(given, (tuple, list)):
        return tensor(*given)
    if isinstance(given, Mapping):
        return {key: _spec(f"{name}.{key}", each) for key, each in given.items()}
    raise ContractError(
        f"{name!r} is described by {given!r}: give sizes like (batch, 16), tensor(...) or maybe(...), "
        "or a dict of these"
    )


def _leaves(path: str, spec: TensorSpec | dict[str, Any]) -> Iterator[tuple[str, TensorSpec]]:
    if isinstance(spec, TensorSpec):
        yield path, spec
    else:
        for key, each in spec.items():
            yield from _leaves(f"{path}.{key}", each)


def _at(args: Mapping[str, Any], path: str) -> Any:
    """Return what a path leads to; None where an optional part is not there."""
    value: Any = args
    for part in path.split("."):
        if value is None:
            return None
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def _check_tensor(path: str, value: Any, spec: TensorSpec) -> None:
    if not isinstance(value, Tensor):
        raise ContractError(f"{path!r} is {type(value).__name__}, the contract wants {spec}")
    if value.dim() != len(spec.shape):
        raise ContractError(
            f"{path!r} has {value.dim()} dimensions, the contract wants {len(spec.shape)}: {spec}"
        )
    if value.dtype != spec.dtype:
        raise ContractError(f"{path!r} is {value.dtype}, the contract wants {spec.dtype}")
    if value.device != spec.device:
        raise ContractError(f"{path!r} is on {value.device}, the contract wants {spec.device}")


def _check_size(
    path: str, number: int, size: int, dim: Dim | int, sizes: dict[str, int]
) -> None:
    if not isinstance(dim, Dim):
        if size != dim:
            raise ContractError(f"size {number} of {path!r} is {size}, the contract fixes it to {dim}")
        return
    if size not in dim:
        raise ContractError(
            f"size {number} of {path!r} ({dim.name}) is {size}, the contract allows {dim.min} to "
            f"{dim.max}"
        )
    if sizes.setdefault(dim.name, size) != size:
        raise ContractError(
            f"size {number} of {path!r} ({dim.name}) is {size}, elsewhere in the call it is "
            f"{sizes[dim.name]}"
        )


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def _example(spec: TensorSpec | dict[str, Any], sizes: Mapping[str, int]) -> Any:
    if isinstance(spec, TensorSpec):
        return spec.example(sizes)
    return {key: _example(each, sizes) for key, each in spec.items()}
