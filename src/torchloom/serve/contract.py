"""What a served model promises about its inputs: which sizes vary, how far, and what is fixed.

    Contract({"ids": tensor(B, S, dtype=torch.int64), "mask": maybe(B, S)}, fixed={"causal": True})

A contract is read twice: when a program is built (examples of any size are made of it) and at each call
(a few comparisons take the place of a compiler's guards).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor

from torchloom.errors import ContractError
from torchloom.serve.specs import (
    Dim,
    Spec,
    TensorSpec,
    leaves,
    made_of,
    spec_from_json,
    spec_of,
    spec_to_json,
)

Gradient = Literal["inference", "no_grad", "grad"]


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
        self.args = {name: spec_of(name, given) for name, given in args.items()}
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
            yield from leaves(name, spec)

    def sizes_of(self, args: Mapping[str, Any]) -> dict[str, int]:
        """Return the varying sizes of a call's arguments.

        Raises:
            ContractError: the call breaks the contract; the text names argument, size and range.
        """
        sizes: dict[str, int] = {}
        given = {path: value_at(args, path) for path, _ in self.tensors()}
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
        args = {name: made_of(name, spec, make) for name, spec in self.args.items()}
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
            "args": {name: spec_to_json(spec) for name, spec in self.args.items()},
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
        args = {name: spec_from_json(spec, dims) for name, spec in stored["args"].items()}
        return cls(args, fixed=stored["fixed"], grad=stored["grad"], training=stored["training"])

    def __repr__(self) -> str:
        shown = [f"{path}: {spec}" for path, spec in self.tensors()]
        shown += [f"{name} = {value!r}" for name, value in self.fixed.items()]
        ranges = [f"{d.name} {d.min}..{d.max}" for d in self.dims.values()]
        return f"Contract({', '.join(shown)}; {', '.join(ranges) or 'nothing varies'})"


def value_at(args: Mapping[str, Any], path: str) -> Any:
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


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)
