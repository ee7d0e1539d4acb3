"""What a served model promises about its inputs: which sizes vary, how far, and what is fixed.

    Contract({"ids": tensor(B, S, dtype=torch.int64), "mask": maybe(B, S)}, fixed={"causal": True})

A contract is read twice: when a program is built (examples of any size are made of it) and at each call
(a few comparisons take the place of a compiler's guards).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from operator import attrgetter
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
    return RecordSpec({name: _spec(name, given) for name, given in parts.items()}, kind)


Spec = TensorSpec | RecordSpec | tuple[Any, ...] | Mapping[str, Any]
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

    def example(
        self,
        sizes: Mapping[str, int] | None = None,
        seed: int = 0,
        without: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return arguments with random values.

        Args:
            sizes: by name; the largest by default.
            seed: of the values.
            without: paths of optional tensors that are None.
        """
        known = self._known(sizes)

        def make(path: str, spec: TensorSpec) -> Tensor | None:
            return None if path in without else spec.example(known, seed)

        return self.made(make)

    def blank(
        self, sizes: Mapping[str, int] | None = None, without: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return arguments whose tensors hold no particular values, to trace with."""
        known = self._known(sizes)
        return self.made(lambda path, spec: None if path in without else spec.empty(known))

    def made(self, make: Callable[[str, TensorSpec], Any]) -> dict[str, Any]:
        """Return arguments whose tensors `make` returns for path and spec."""
        args = {name: _made(name, spec, make) for name, spec in self.args.items()}
        return {**args, **self.fixed}

    def _known(self, sizes: Mapping[str, int] | None) -> dict[str, int]:
        return {name: dim.max for name, dim in self.dims.items()} | dict(sizes or {})

    def names_at(self, places: Mapping[str, Iterable[int]]) -> tuple[str, ...]:
        """Return the names of the dims at places like {"ids": [0]}.

        Raises:
            ContractError: the size there does not vary.
        """
        found: dict[str, None] = {}
        for path, spec in self.tensors():
            for place in places.get(path.partition(".")[0], ()):
                dim = spec.shape[place]
                if not isinstance(dim, Dim):
                    raise ContractError(f"size {place} of {path!r} does not vary: it is {dim}")
                found[dim.name] = None
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return it as texts and numbers; `from_json` reads it again."""
        return {
            "args": {name: _to_json(spec) for name, spec in self.args.items()},
            "dims": {dim.name: [dim.min, dim.max] for dim in self.dims.values()},
            "fixed": {
                name: value if _is_plain(value) else f"<{type(value).__qualname__}>"
                for name, value in self.fixed.items()
            },
            "is whole": all(map(_is_plain, self.fixed.values())),
            "grad": self.grad,
            "training": self.training,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Contract:
        """Return what `to_json` wrote.

        Raises:
            ContractError: it fixed a value that could not be written down.
        """
        if not stored["is whole"]:
            raise ContractError(
                "the stored contract fixes arguments that are no numbers or texts: give the contract"
            )
        dims = {name: Dim(name, *ends) for name, ends in stored["dims"].items()}
        args = {name: _from_json(spec, dims) for name, spec in stored["args"].items()}
        return cls(args, fixed=stored["fixed"], grad=stored["grad"], training=stored["training"])

    def __repr__(self) -> str:
        shown = [f"{path}: {spec}" for path, spec in self.tensors()]
        shown += [f"{name} = {value!r}" for name, value in self.fixed.items()]
        ranges = [f"{d.name} {d.min}..{d.max}" for d in self.dims.values()]
        return f"Contract({', '.join(shown)}; {', '.join(ranges) or 'nothing varies'})"


def _spec(name: str, given: Any) -> TensorSpec | RecordSpec:
    if isinstance(given, (TensorSpec, RecordSpec)):
        return given
    if isinstance(given, (tuple, list)):
        return tensor(*given)
    if isinstance(given, Mapping):
        return RecordSpec({key: _spec(f"{name}.{key}", each) for key, each in given.items()})
    raise ContractError(
        f"{name!r} is described by {given!r}: give sizes like (batch, 16), tensor(...) or maybe(...), "
        "or a dict of these"
    )


def _leaves(path: str, spec: TensorSpec | RecordSpec) -> Iterator[tuple[str, TensorSpec]]:
    if isinstance(spec, TensorSpec):
        yield path, spec
    else:
        for key, each in spec.parts.items():
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
    if not value.is_contiguous():
        raise ContractError(
            f"{path!r} is not contiguous (strides {tuple(value.stride())} for sizes "
            f"{tuple(value.shape)}): call .contiguous() on it first"
        )
    if value.device != spec.device:
        raise ContractError(f"{path!r} is on {value.device}, the contract wants {spec.device}")


def _check_size(path: str, number: int, size: int, dim: Dim | int, sizes: dict[str, int]) -> None:
    if not isinstance(dim, Dim):
        if size != dim:
            raise ContractError(
                f"size {number} of {path!r} is {size}, the contract fixes it to {dim}"
            )
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


def _made(path: str, spec: TensorSpec | RecordSpec, make: Callable[[str, TensorSpec], Any]) -> Any:
    if isinstance(spec, TensorSpec):
        return make(path, spec)
    return spec.kind(
        **{key: _made(f"{path}.{key}", each, make) for key, each in spec.parts.items()}
    )


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _to_json(spec: TensorSpec | RecordSpec) -> dict[str, Any]:
    if isinstance(spec, RecordSpec):
        kind = f"{spec.kind.__module__}:{spec.kind.__qualname__}"
        return {"kind": kind, "parts": {key: _to_json(each) for key, each in spec.parts.items()}}
    return {
        "sizes": [dim.name if isinstance(dim, Dim) else dim for dim in spec.shape],
        "dtype": str(spec.dtype).removeprefix("torch."),
        "device": str(spec.device),
        "optional": spec.optional,
        "below": spec.below,
    }


def _from_json(stored: Mapping[str, Any], dims: Mapping[str, Dim]) -> TensorSpec | RecordSpec:
    if "parts" in stored:
        module, _, name = stored["kind"].partition(":")
        kind = attrgetter(name)(import_module(module))
        return RecordSpec(
            {key: _from_json(each, dims) for key, each in stored["parts"].items()}, kind
        )
    return TensorSpec(
        tuple(dims[size] if isinstance(size, str) else size for size in stored["sizes"]),
        getattr(torch, stored["dtype"]),
        torch.device(stored["device"]),
        stored["optional"],
        stored["below"],
    )
