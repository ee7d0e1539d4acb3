"""Run a program and the model on the same values, and compare everything.

Guards do not record all that depends on a size: `squeeze` behaves differently at size 1 and leaves none. Compared are
results (tuples, dicts, objects by their attributes), sizes, dtypes and values of tensors, what was written to arguments,
buffers and other tensors, and what the program put in attributes and containers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ServeError, TorchloomError
from torchloom.serve.builder.compare.differences import Difference, first_difference
from torchloom.serve.builder.prove import show_sizes
from torchloom.serve.call.eager import eager
from torchloom.serve.call.entry import Run
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.specs import TensorSpec
from torchloom.serve.model.snapshot import ABSENT, ModelSnapshot
from torchloom.serve.model.target import Target

LEFT = "what is left in"
"""Begins the path of a difference in an attribute or a container."""


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
) -> Difference | None:
    """Run a program and the model itself; return the first difference.

    Args:
        target: the model; its buffers are what they were before.
        contract: what arguments look like.
        run: the program, which takes the model first.
        sizes: of the arguments.
        without: paths of optional tensors that are None.
        values: makes other arguments of random ones, those that the contract itself fills aside.

    Raises:
        ServeError: the model itself fails. That the program does where the model does not is a difference.
    """
    args = contract.example(sizes, without=without, values=values)
    before = ModelSnapshot(target)
    wanted = _ran_model(target, args, before, sizes)
    try:
        found = _ran(target, args, before, partial(call_program, run, target))
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
    """Run the model itself on example arguments; it is what it was before.

    Raises:
        ServeError: it fails.
    """
    args = contract.example(sizes, without=without)
    return _ran_model(target, args, ModelSnapshot(target), sizes).result


def is_random(
    target: Target, contract: Contract, sizes: Mapping[str, int], without: frozenset[str]
) -> bool:
    """Say whether the model itself returns other values for another seed.

    Raises:
        ServeError: it fails.
    """
    args = contract.example(sizes, without=without)
    before = ModelSnapshot(target)
    one, other = (_ran_model(target, args, before, sizes, seed) for seed in (0, 1))
    return difference_of(one, other) is not None


def call_model(
    target: Target, args: Mapping[str, Any], seed: int = 0, sizes: Mapping[str, int] | None = None
) -> Any:
    """Call the model itself, eagerly; random numbers are the same each time.

    Args:
        target: the model.
        args: by name; calls may write to them.
        seed: of torch's random numbers.
        sizes: what they were made for, for the message.

    Raises:
        ServeError: it fails.
    """
    try:
        with eager():
            return _call(target.call, target, args, seed)
    except (TorchloomError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the user's forward may raise anything
        at = f" at {show_sizes([sizes])}" if sizes else ""
        raise ServeError(
            f"{target.name} itself, run on example arguments{at}, fails with {_first_line(error)}: leave such sizes "
            "out of the contract, or let `fill` make other examples"
        ) from error


def call_program(run: Run, target: Target, args: Mapping[str, Any], seed: int = 0) -> Any:
    """Call a program of the model as `call_model` calls the model."""
    owner = () if target.owner is None else (target.owner,)
    return _call(partial(run, *owner), target, args, seed)


def copied_args(target: Target, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of arguments; the model itself, where one is or holds it, stays what it is."""
    memo: dict[int, Any] = {id(target.module): target.module}
    return {name: copy.deepcopy(value, memo) for name, value in args.items()}


def _call(call: Any, target: Target, args: Mapping[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    places, rest = target.divided(args)
    return call(*places, **rest)


def _ran_model(
    target: Target,
    args: Mapping[str, Any],
    before: ModelSnapshot,
    sizes: Mapping[str, int],
    seed: int = 0,
) -> Ran:
    return _ran(target, args, before, partial(call_model, target, seed=seed, sizes=sizes))


def _ran(
    target: Target, args: Mapping[str, Any], before: ModelSnapshot, call: Callable[..., Any]
) -> Ran:
    """Run on copies, and put back what that changed."""
    copies = copied_args(target, args)
    try:
        result = call(args=copies)
        after = {
            name: each
            for name, each in copies.items()
            if isinstance(each, (Tensor, Mapping, list, tuple)) or dataclasses.is_dataclass(each)
        }
        return Ran(result, after, before.written(), before.put())
    finally:
        before.restore()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
