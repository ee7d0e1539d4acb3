"""Why a call does not run a program: one sentence that names the argument, the mode or the size."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchloom._torch.modes import (
    dispatch_modes,
    forward,
    function_modes,
    is_jit_tracing,
    transform_level,
)
from torchloom.errors import ContractError
from torchloom.serve.call.arguments import Asked, check_asked
from torchloom.serve.call.layouts import apart
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.checks import argument_at
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.plain_values import is_plain, same
from torchloom.serve.model.target import Target


class Asking(Protocol):
    """The part of a program for some sizes that says what it asks of calls."""

    box: Box
    without: frozenset[str]
    checks: tuple[str, ...]
    asked: Asked
    writes: bool


def refuse(
    target: Target, contract: Contract, variants: Sequence[Asking], args: Mapping[str, Any]
) -> None:
    """Say why a call is none that a program was built for.

    Args:
        target: the model.
        contract: which the call's tensors keep.
        variants: the programs.
        args: the call's arguments; further positional ones behind names with a star.

    Raises:
        ContractError: always.
    """
    _refuse_mode(target, contract)
    tensors = {
        path: tensor
        for path, _ in contract.tensors()
        if isinstance(tensor := argument_at(args, path), Tensor)
    }
    if any(variant.writes for variant in variants):
        _refuse_shared(tensors)
    _refuse_others(target, contract, args)
    without = {path for path, _ in contract.tensors() if path not in tensors}
    sizes = contract.sizes_of(args)
    known = {f"n_{name}": size for name, size in sizes.items()}
    known |= {each.variable: argument_at(args, each.path) for each in contract.floats()}
    for variant in variants:
        if variant.without == without:
            check_asked(variant.asked, args, tensors)
            if sizes in variant.box:
                _refuse_sizes(variant, known)
    raise ContractError(
        f"the call is none that the program was built for: the contract is {contract}, and tensors have to be "
        "plain ones"
    )


def refuse_modes() -> None:
    """Refuse calls under modes that change what operators do: a program's kernels would not see them.

    Raises:
        ContractError: one is active.
    """
    if found := [*function_modes(), *dispatch_modes()]:
        raise ContractError(
            f"the call is under {', '.join(found)}, which the program's kernels do not see: call the model itself "
            "there"
        )
    if transform_level() is not None:
        raise ContractError(
            "the call is inside of a transform of torch.func (vmap, grad, functionalize), whose tensors the program's "
            "kernels cannot read: call the model itself there"
        )
    if is_jit_tracing():
        raise ContractError(
            "the call is inside of torch.jit.trace, which cannot follow the program's kernels: trace the model itself"
        )
    if forward._current_level >= 0:
        raise ContractError(
            "the call is inside of torch.autograd.forward_ad.dual_level(), and programs have no forward derivatives: "
            "call the model itself there"
        )


def _refuse_mode(target: Target, contract: Contract) -> None:
    if contract.grad == "inference" and not torch.is_inference_mode_enabled():
        raise ContractError("the contract wants calls under torch.inference_mode()")
    if contract.grad == "no_grad" and torch.is_grad_enabled():
        raise ContractError("the contract wants calls under torch.no_grad() or inference_mode()")
    if contract.grad == "grad" and not torch.is_grad_enabled():
        raise ContractError("the contract wants calls with gradients, under torch.enable_grad()")
    if any(map(torch.is_autocast_enabled, target.device_types(contract))):
        raise ContractError(
            "the program was built without autocast, and the call is under it: enter autocast in the "
            "model's forward, where it becomes part of the program"
        )
    if target.module is not None and target.module.training is not contract.training:
        wanted = "train()" if contract.training else "eval()"
        raise ContractError(f"the contract wants the model in another mode: call model.{wanted}")


def _refuse_others(target: Target, contract: Contract, args: Mapping[str, Any]) -> None:
    """Refuse arguments that are in no contract, but for those that have their defaults."""
    known = {*contract.args, *contract.fixed}
    defaults = {p.name: p.default for p in target.parameters_for(contract)}
    for name, value in args.items():
        if name in known:
            continue
        if name.startswith("*"):
            if value:
                raise ContractError(f"{len(value)} more positional arguments are in no contract")
        elif name not in defaults:
            raise ContractError(f"{name!r} is in no contract: name it in `args` or `fixed`")
        elif value is not defaults[name] and not (
            is_plain(defaults[name]) and same(value, defaults[name])
        ):
            raise ContractError(
                f"{name!r} is {value!r}, the program is for its default {defaults[name]!r}: name it "
                "in the contract's `fixed`"
            )


def _refuse_sizes(variant: Asking, known: Mapping[str, Any]) -> None:
    """Refuse sizes for which does not hold what was assumed of them and tried for some only."""
    for check in variant.checks:
        if not eval(
            check, {"math": math, "torch": torch}, dict(known)
        ):  # written by the build, signed in a store
            there = ", ".join(f"{name.removeprefix('n_')} {size}" for name, size in known.items())
            said = re.sub(r"\bn_(\w+)", r"\1", check)
            raise ContractError(
                f"the program for {variant.box} assumes {said}, which held for all sizes that were tried and does "
                f"not for {there}: cut the contract there with `ranges`"
            )


def _refuse_shared(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that share memory in a call of a program that writes."""
    for (one, first), (other, second) in itertools.combinations(tensors.items(), 2):
        if not apart(first, second):
            raise ContractError(
                f"{one!r} and {other!r} share memory, and the program may write to it: pass a clone() as "
                "one of them"
            )
