"""Is a compiled program the model? Both are run on the same values, and everything is compared.

Guards do not tell all: `squeeze` does something else at size 1 and leaves no guard. What is compared: the
shape of the result (tuples, dicts, objects by their attributes), each tensor's sizes, dtype and values, what was
written to arguments, buffers and other tensors, and what the program put in attributes and containers.
"""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import functools
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ServeError, TorchloomError
from torchloom.serve.call.bypass import bypassed
from torchloom.serve.call.entry import Run
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.specs import TensorSpec
from torchloom.serve.model.reachable import ABSENT, attributes_of, is_array
from torchloom.serve.model.snapshot import State
from torchloom.serve.model.spelling import NotExactError, exact
from torchloom.serve.model.target import Target

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Of the largest value in a tensor. What is looked for are other results, not other roundings: kernels that
sum in another order differ by a few units in the last place per layer."""


LEFT = "what is left in"
"""Begins the path of a difference in an attribute or a container."""


@dataclass(frozen=True)
class Difference:
    """What two results differ in."""

    path: str
    text: str
    is_of_values: bool = False
    """Whether all but the values of a tensor is equal."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


@dataclass(frozen=True)
class Ran:
    """What a run returned and left behind."""

    result: Any
    args: Mapping[str, Any]
    """Arguments that hold tensors, afterwards."""
    written: Mapping[str, tuple[Tensor, Tensor]]
    """Tensors that were written: what they were, what they are."""
    put: Mapping[str, tuple[Any, Any]]
    """What attributes and containers held, and hold."""


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
    before = State(target)
    wanted = _ran_model(target, args, before, sizes)
    first = () if target.owner is None else (target.owner,)
    try:
        found = _ran(run, target, first, args, before)
    except (TorchloomError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - operators may raise anything
        kind = type(wanted.result).__name__
        return Difference("result", f"a {kind}, compiled {_first_line(error)}")
    return difference_of(wanted, found)


def difference_of(wanted: Ran, found: Ran) -> Difference | None:
    """Return the first difference of two runs: of the model, and of its program."""
    written = "what was written to"
    if difference := (
        first_difference(wanted.result, found.result, "result")
        or first_difference(wanted.args, found.args, written)
    ):
        return difference
    for name in {**wanted.written, **found.written}:
        known = wanted.written.get(name) or found.written[name][:1] * 2
        now = found.written.get(name) or known[:1] * 2
        if difference := first_difference(known[1], now[1], f"{written}[{name!r}]"):
            return difference
    # What the model alone puts somewhere is code that is not compiled (`if not is_compiling()`).
    for name, (was, now) in found.put.items():
        _, wants = wanted.put.get(name, (was, was))
        path = f"{LEFT} {name}"
        if wants is ABSENT:
            return Difference(path, f"nothing, compiled {now!r}")
        if difference := first_difference(wants, now, path):
            return difference
    return None


def result_at(
    target: Target, contract: Contract, sizes: Mapping[str, int], without: frozenset[str]
) -> Any:
    """Run the model itself; its buffers are what they were before.

    Raises:
        ServeError: it fails.
    """
    args = contract.example(sizes, without=without)
    return _ran_model(target, args, State(target), sizes).result


def is_random(
    target: Target, contract: Contract, sizes: Mapping[str, int], without: frozenset[str]
) -> bool:
    """Say whether the model itself returns other values for another seed.

    Raises:
        ServeError: it fails.
    """
    args = contract.example(sizes, without=without)
    before = State(target)
    one, other = (_ran_model(target, args, before, sizes, seed) for seed in (0, 1))
    return difference_of(one, other) is not None


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
    before = State(target)
    wanted = _ran_model(target, args, before, sizes)
    for order in (names[::-1], [*names[1:], names[0]]):
        others = {**{n: args[n] for n in args if n in own}, **{n: args[n] for n in order}}
        if difference_of(wanted, _ran_model(target, others, before, sizes)):
            raise ServeError(
                f"{target.name} goes by the order of {', '.join(names)} in its **{target.rest}, which programs do not "
                "see: name them in its signature, or take one dict, whose order is asked"
            )


def first_difference(wanted: Any, found: Any, path: str) -> Difference | None:
    """Return the first difference of two nested values.

    Raises:
        ServeError: they hold something that cannot be compared.
    """
    return _difference(wanted, found, path, frozenset())


def _difference(  # noqa: PLR0911 - one answer for each kind
    wanted: Any, found: Any, path: str, within: frozenset[int]
) -> Difference | None:
    if isinstance(wanted, Tensor):
        text = (
            _tensors(wanted, found)
            if isinstance(found, Tensor)
            else f"a tensor, compiled {found!r}"
        )
        is_of_values = isinstance(found, Tensor) and (wanted.shape, wanted.dtype) == (
            found.shape,
            found.dtype,
        )
        return Difference(path, text, is_of_values) if text else None
    if type(wanted) is not type(found):
        return Difference(path, f"{type(wanted).__name__}, compiled {type(found).__name__}")
    if wanted is found or id(wanted) in within:
        return None
    if isinstance(wanted, _VALUES):
        is_same = wanted == found or (wanted != wanted and found != found)
        return None if is_same else Difference(path, f"{wanted!r}, compiled {found!r}")
    if is_array(wanted):
        same = wanted.shape == found.shape and wanted.dtype == found.dtype
        if not same or wanted.dtype.kind not in "biuf":
            is_same = same and bool((wanted == found).all())
            return None if is_same else Difference(path, "another array")
        return _difference(torch.tensor(wanted), torch.tensor(found), path, within)
    ours, theirs = parts_of(wanted), parts_of(found)
    if ours is None or theirs is None:
        return _by_spelling(wanted, found, path)
    if ours.keys() != theirs.keys():
        return Difference(path, f"parts {list(ours)}, compiled {list(theirs)}")
    for name, each in ours.items():
        inner = within | {id(wanted)}
        if difference := _difference(each, theirs[name], f"{path}{name}", inner):
            return difference
    return None


_VALUES = (int, float, str, bool, type(None))


def parts_of(value: Any) -> dict[str, Any] | None:
    """Return what a value holds, by the steps that lead there; None if it does not hold things by name or place."""
    attributes = {f".{name}": each for name, each in attributes_of(value).items()}
    if isinstance(value, Mapping):
        return {f"[{key!r}]": each for key, each in value.items()} | attributes
    if isinstance(value, functools.partial):
        return {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    if isinstance(value, (list, tuple, collections.deque, ValuesView, ItemsView)):
        return {f"[{place}]": each for place, each in enumerate(value)} | attributes
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f".{each.name}": getattr(value, each.name) for each in dataclasses.fields(value)}
        return fields | attributes
    is_object = hasattr(value, "__dict__") or bool(attributes)
    return attributes if is_object and not callable(value) and not _gives(value) else None


def _gives(value: Any) -> bool:
    """Say whether a value hands out what it holds in ways of its own: sets and iterators do."""
    return isinstance(value, (collections.abc.Set, Iterator))


def _by_spelling(wanted: Any, found: Any, path: str) -> Difference | None:
    """Compare what is no container: by the text that stands for it, if there is one."""
    try:
        if getattr(wanted, "__closure__", None):
            raise NotExactError("what a function holds is part of no text")
        ours, theirs = exact(wanted), exact(found)
    except NotExactError:
        kind = type(wanted).__name__
        raise ServeError(
            f"{path} is or holds a {kind}, which cannot be compared with the program's: return tensors in tuples, "
            "lists, dicts or objects"
        ) from None
    if isinstance(wanted, collections.abc.Set) and any(isinstance(each, Tensor) for each in wanted):
        raise ServeError(
            f"{path} is a {type(wanted).__name__} of tensors, which have no order in it and cannot be compared with "
            "the program's: return a list"
        )
    return None if ours == theirs else Difference(path, f"{wanted!r}, compiled {found!r}")


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
    target: Target,
    args: Mapping[str, Any],
    before: State,
    sizes: Mapping[str, int],
    seed: int = 0,
) -> Ran:
    try:
        with bypassed():
            return _ran(target.call, target, (), args, before, seed)
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
    seed: int = 0,
) -> Ran:
    """Run on copies, and put back what that changed."""
    copies = copied(target, args)
    try:
        result = called(call, target, first, copies, seed)
        after = {name: each for name, each in copies.items() if _holds_tensors(each)}
        return Ran(result, after, before.written(), before.put())
    finally:
        before.restore()


def copied(target: Target, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of arguments; the model itself, where one is or holds it, stays what it is."""
    memo: dict[int, Any] = {id(target.module): target.module}
    return {name: copy.deepcopy(value, memo) for name, value in args.items()}


def called(
    call: Any, target: Target, first: tuple[Any, ...], args: Mapping[str, Any], seed: int = 0
) -> Any:
    """Call a model or a program with arguments by name; random numbers are the same each time."""
    torch.manual_seed(seed)
    places, rest = target.divided(args)
    return call(*first, *places, **rest)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (Tensor, Mapping, list, tuple)) or dataclasses.is_dataclass(value)
