"""What a served model promises about its inputs: which sizes vary, how far, and what is fixed.

    Contract({"ids": tensor(B, S, dtype=torch.int64), "mask": maybe(B, S)}, fixed={"causal": True})

A contract is read twice: when a program is built (examples of any size are made of it) and at each call
(a few comparisons take the place of a compiler's guards).
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor

from torchloom.errors import ContractError
from torchloom.serve.contract.dims import Derived, Dim, Float, Size
from torchloom.serve.contract.specs import (
    AnySpec,
    NumberSpec,
    RecordSpec,
    Spec,
    TensorSpec,
    made_of,
    spec_of,
    within,
)

Gradient = Literal["inference", "no_grad", "grad"]


class Contract:
    """The promise.

    Args:
        args: what each argument looks like that varies, by name: `tensor(B, 16)`, or `(B, 16)` for the
            default dtype; a `Dim` for a whole number, `number(0.0, 1.0)` for a float; or a dict, list or
            tuple of these for an argument that holds them so.
        fixed: other arguments, with the one value that they have at every call.
        grad: "inference" (under `torch.inference_mode`), "no_grad", or "grad".
        training: whether modules are in training mode.

    Raises:
        ContractError: one name stands for two ranges, or an entry is no size, tensor or dict.

    Example:
        >>> batch = Dim("batch", 1, 64)
        >>> contract = Contract({"x": (batch, 16)})
        >>> contract
        Contract(x: float32[batch, 16]; batch 1 to 64)
        >>> contract.example({"batch": 5})["x"].shape
        torch.Size([5, 16])
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
        self.is_of_call = False
        """Whether it stands for a call of the model: what a later call leaves out has the model's own default then."""
        self.grad, self.training = grad, training
        if grad not in ("inference", "no_grad", "grad"):
            raise ContractError(f"grad is 'inference', 'no_grad' or 'grad', not {grad!r}")
        both = self.args.keys() & self.fixed.keys()
        if both:
            raise ContractError(f"{min(both)!r} is both an argument that varies and fixed")
        sizes: list[Size] = [size for _, spec in self.tensors() for size in spec.shape]
        sizes += [spec.size for _, spec in self.numbers() if spec.size is not None]
        self.dims: dict[str, Dim] = {}
        for dim in (size.dim for size in sizes if not isinstance(size, int)):
            if self.dims.setdefault(dim.name, dim) != dim:
                raise ContractError(
                    f"{dim.name!r} stands for two ranges, {self.dims[dim.name]} and {dim}: use two names"
                )
        for number in self.floats():
            if number.variable in map("n_{}".format, self.dims):
                raise ContractError(
                    f"{number.path!r} is a number and the name of a size: give the size another name"
                )
        self.derived = tuple(dict.fromkeys(size for size in sizes if isinstance(size, Derived)))
        """Sizes that follow from dims."""

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield each tensor with the path that leads to it."""
        return ((path, spec) for path, _, spec in self.places() if isinstance(spec, TensorSpec))

    def numbers(self) -> Iterator[tuple[str, NumberSpec]]:
        """Yield each number that varies with the path that leads to it."""
        return ((path, spec) for path, _, spec in self.places() if isinstance(spec, NumberSpec))

    def floats(self) -> list[Float]:
        """Return the floats that vary."""
        return [
            Float(path, spec.low, spec.high) for path, spec in self.numbers() if spec.size is None
        ]

    def places(self) -> Iterator[tuple[str, str, AnySpec]]:
        """Yield each argument and all that it holds: the path that leads there, the same as Python, and the spec."""
        for name, spec in self.args.items():
            yield from within(name, name, spec)

    def example(
        self,
        sizes: Mapping[str, int] | None = None,
        seed: int = 0,
        without: Collection[str] = (),
        values: Callable[[TensorSpec, Tensor], Tensor] | None = None,
    ) -> dict[str, Any]:
        """Return arguments with random values.

        Args:
            sizes: by name; the largest by default. Floats that vary may be among them, by path.
            seed: of the values.
            without: paths of optional tensors that are None.
            values: makes others of these, where the contract does not say how they are filled.
        """

        def make(path: str, spec: TensorSpec, known: Mapping[str, int]) -> Tensor:
            # Each its own values: equal ones would hide that a program takes one for another.
            made = spec.example(known, seed + zlib.crc32(path.encode()))
            return made if values is None or spec.fill is not None else values(spec, made)

        return self._with_tensors(sizes, without, make)

    def blank(
        self, sizes: Mapping[str, int] | None = None, without: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return arguments whose tensors hold no particular values, to trace with."""
        return self._with_tensors(sizes, without, lambda _, spec, known: spec.empty(known))

    def _with_tensors(
        self,
        sizes: Mapping[str, int] | None,
        without: Collection[str],
        make: Callable[[str, TensorSpec, Mapping[str, int]], Tensor],
    ) -> dict[str, Any]:
        known = {name: dim.max for name, dim in self.dims.items()} | dict(sizes or {})

        def made(path: str, spec: TensorSpec | NumberSpec) -> Any:
            if isinstance(spec, NumberSpec):
                return spec.value(path, known)
            return None if path in without else make(path, spec, known)

        return self.made(made)

    def made(self, make: Callable[[str, TensorSpec | NumberSpec], Any]) -> dict[str, Any]:
        """Return arguments whose tensors and numbers `make` returns for path and spec."""
        args = {name: made_of(name, spec, make) for name, spec in self.args.items()}
        return {**args, **self.fixed}

    def names_at(self, places: Mapping[str, Iterable[int]]) -> tuple[str, ...]:
        """Return the names of the dims at places like {"ids": [0]}.

        Raises:
            ContractError: the size there does not vary.
        """
        found: dict[str, None] = {}
        for path, spec in self.tensors():
            for place in places.get(path.partition(".")[0], ()):
                dim = spec.shape[place]
                if isinstance(dim, int):
                    raise ContractError(f"size {place} of {path!r} does not vary: it is {dim}")
                found[dim.dim.name] = None
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return what tells one contract from another, as texts."""
        return {
            "args": [[code, spec.words()] for _, code, spec in self.places()],
            "dims": [str(dim) for dim in self.dims.values()],
            "fixed": {
                name: value if _is_plain(value) else f"<{type(value).__qualname__}>"
                for name, value in self.fixed.items()
            },
            "grad": self.grad,
            "training": self.training,
        }

    def to_text(self) -> str:
        """Return it for another process; nothing where it holds what only this one has."""
        if not all(map(_is_plain, self.fixed.values())):
            return ""
        try:
            return pickle.dumps(self).hex()
        except (pickle.PicklingError, AttributeError, TypeError):  # a class within a function
            return ""

    @classmethod
    def from_text(cls, content: str) -> Contract:
        """Return what `to_text` wrote, in this process or one whose signature holds.

        Raises:
            ContractError: it could not be written down, or the class of an argument cannot be imported.
        """
        if not content:
            raise ContractError(
                "the stored contract fixes arguments that are no numbers or texts: give the contract"
            )
        try:
            found = pickle.loads(bytes.fromhex(content))
        except (ImportError, AttributeError) as error:
            raise ContractError(
                f"the stored contract has an argument of a class that cannot be imported ({error}): give the contract"
            ) from error
        found.is_of_call = False
        return found

    def __repr__(self) -> str:
        leaves = [(path, it) for path, _, it in self.places() if not isinstance(it, RecordSpec)]
        shown = [f"{path}: {spec}" for path, spec in leaves]
        shown += [f"{name} = {value!r}" for name, value in self.fixed.items()]
        ranges = [str(dim) for dim in self.dims.values()]
        return f"Contract({', '.join(shown)}; {', '.join(ranges) or 'nothing varies'})"


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)
