"""Is a compiled program the model? Both are run on the same values, and everything is compared.

Guards do not tell all: `squeeze` does something else at size 1 and leaves no guard. What is compared: the
shape of the result (tuples, dicts, dataclasses), each tensor's sizes, dtype and values, and what was written
to arguments and buffers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ServeError, TorchloomError
from torchloom.serve.bypass import bypassed
from torchloom.serve.contract import Contract
from torchloom.serve.entry import Run
from torchloom.serve.specs import TensorSpec
from torchloom.serve.target import Target
from torchloom.serve.undisturbed import State

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Of the largest value in a tensor. What is looked for are other results, not other roundings: kernels that
sum in another order differ by a few units in the last place per layer."""


@dataclass(frozen=True)
class Difference:
    """What two results differ in."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def differences_at(
    target: Target,
    contract: Contract,
    run: Run,
    sizes: Mapping[str, int],
    without: frozenset[str] = frozenset(),
    values: Callable[[TensorSpec, Tensor], Tensor] | None = None,
    one_object: Sequence[str] = (),
) -> Difference | None:
    """Run a program and the model itself; return the first difference.

    Args:
        target: the model; its buffers are what they were before.
        contract: what arguments look like.
        run: the program, which takes the model first.
        sizes: of the arguments.
        without: paths of optional tensors that are None.
        values: makes other arguments of random ones, those that the contract itself fills aside.
        one_object: names of arguments that are one tensor.

    Raises:
        ServeError: the model itself fails. That the program does where the model does not is a difference.
    """
    args = contract.example(sizes, without=without, values=values)
    for name in one_object:
        args[name] = args[one_object[0]]
    before = State(target.module)
    wanted, wanted_after = _ran_model(target, args, before, sizes)
    first = () if target.owner is None else (target.owner,)
    try:
        found, found_after = _ran(run, target, first, args, before)
    except (TorchloomError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - operators may raise anything
        return Difference("result", f"a {type(wanted).__name__}, compiled {_first_line(error)}")
    return first_difference(wanted, found, "result") or first_difference(
        wanted_after, found_after, "what was written to"
    )


def result_at(
    target: Target, contract: Contract, sizes: Mapping[str, int], without: frozenset[str]
) -> Any:
    """Run the model itself; its buffers are what they were before.

    Raises:
        ServeError: it fails.
    """
    args = contract.example(sizes, without=without)
    return _ran_model(target, args, State(target.module), sizes)[0]


def check_order(
    target: Target, contract: Contract, sizes: Mapping[str, int], without: frozenset[str]
) -> None:
    """Refuse a model whose result follows from the order in which it gets what it takes as `**rest`.

    Raises:
        ServeError: it does; or the model itself fails.
    """
    own = {parameter.name for parameter in target.parameters}
    args = contract.example(sizes, without=without)
    names = [name for name in args if name not in own]
    if len(names) < 2:
        return
    before = State(target.module)
    wanted, wanted_after = _ran_model(target, args, before, sizes)
    for order in (names[::-1], [*names[1:], names[0]]):
        others = {**{n: args[n] for n in args if n in own}, **{n: args[n] for n in order}}
        found, found_after = _ran_model(target, others, before, sizes)
        if first_difference(wanted, found, "result") or first_difference(
            wanted_after, found_after, "what was written to"
        ):
            raise ServeError(
                f"{target.name} goes by the order of {', '.join(names)} in its **{target.rest}, which programs do not "
                "see: name them in its signature, or take one dict, whose order is asked"
            )


def first_difference(  # noqa: PLR0911 - one answer for each kind
    wanted: Any, found: Any, path: str
) -> Difference | None:
    """Return the first difference of two nested values."""
    if isinstance(wanted, Tensor):
        text = (
            _tensors(wanted, found)
            if isinstance(found, Tensor)
            else f"a tensor, compiled {found!r}"
        )
        return Difference(path, text) if text else None
    if type(wanted) is not type(found):
        return Difference(path, f"{type(wanted).__name__}, compiled {type(found).__name__}")
    if isinstance(wanted, (Mapping, list, tuple)) or dataclasses.is_dataclass(wanted):
        ours, theirs = dict(_parts(wanted)), dict(_parts(found))
        if ours.keys() != theirs.keys():
            return Difference(path, f"parts {list(ours)}, compiled {list(theirs)}")
        for name, each in ours.items():
            if difference := first_difference(each, theirs[name], f"{path}{name}"):
                return difference
        return None
    if isinstance(wanted, (int, float, str, bool, type(None))) and wanted != found:
        return Difference(path, f"{wanted!r}, compiled {found!r}")
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", each) for place, each in enumerate(value))
    else:
        yield from (
            (f".{each.name}", getattr(value, each.name)) for each in dataclasses.fields(value)
        )


def _tensors(wanted: Tensor, found: Tensor) -> str:
    if wanted.shape != found.shape:
        return f"sizes {list(wanted.shape)}, compiled {list(found.shape)}"
    if wanted.dtype != found.dtype:
        return f"{wanted.dtype}, compiled {found.dtype}"
    if not wanted.numel():
        return ""
    if not (wanted.dtype.is_floating_point or wanted.dtype.is_complex):
        return "" if torch.equal(wanted, found) else "other values"
    if wanted.is_floating_point() and wanted.itemsize == 1:
        wanted, found = wanted.float(), found.float()  # for which few operators are there
    if not torch.equal(torch.isfinite(wanted), torch.isfinite(found)):
        return "not finite in other places"
    a, b = torch.nan_to_num(wanted.detach()), torch.nan_to_num(found.detach())
    largest = a.abs().max().double()
    error = (a - b).abs().max().double()
    allowed = _TOLERANCE.get(wanted.dtype, 1e-1) * max(float(largest), 1e-6)
    return "" if float(error) <= allowed else f"values up to {largest:.4g} differ by {error:.4g}"


def _ran_model(
    target: Target, args: Mapping[str, Any], before: State, sizes: Mapping[str, int]
) -> tuple[Any, Any]:
    try:
        with bypassed():
            return _ran(target.call, target, (), args, before)
    except (TorchloomError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        at = f" at {shown}" if shown else ""
        raise ServeError(
            f"{target.name} itself, run on example arguments{at}, fails with {_first_line(error)}: leave such sizes "
            "out of the contract, or let `fill` make other examples"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _ran(
    call: Any,
    target: Target,
    first: tuple[Any, ...],
    args: Mapping[str, Any],
    before: State,
) -> tuple[Any, Any]:
    """Run on copies; return the result, and arguments and buffers as they are afterwards."""
    memo: dict[int, Any] = {id(target.module): target.module}
    copies = {name: copy.deepcopy(value, memo) for name, value in args.items()}
    try:
        torch.manual_seed(0)
        places, rest = target.divided(copies)
        result = call(*first, *places, **rest)
        after = {**{n: v for n, v in copies.items() if _holds_tensors(v)}, **before.tensors_now()}
    finally:
        before.restore()
    return result, after


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (Tensor, Mapping, list, tuple)) or dataclasses.is_dataclass(value)
