"""All that calls are asked before a program runs: what the contract says, what the trace read of arguments, modes.

Forward may read more of its arguments than their tensors: a flag of a dataclass, an attribute that somebody set on a tensor,
whether two arguments are one object. The trace's guards on these are stored as data, and become conditions here:

    ["value", "batch.causal", False]      batch.causal is False
    ["type", "batch.options", "m.Opts"]   it is an object of that class
    ["has", "x", "scale", False]          x has no attribute scale
    ["apart"]                             no tensor is passed twice: forward compares objects by identity
    ["plain"]                             tensors are no parameters of any model: forward asks for types
    ["strides"]                           strides are those of the sizes, where a size is 1 as well
    ["requires_grad", False]              no tensor requires gradients
    ["whole"]                             tensors are no views of others, and begin where their memory does
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchloom._torch.modes import (
    dispatch_modes,
    forward,
    function_modes,
    is_jit_tracing,
    num_dispatch_modes,
    num_function_modes,
    transform_level,
)
from torchloom.serve.call.entry_signature import EntrySignature
from torchloom.serve.contract.conditions import UNLIKE, Condition, SpecConditions, Values
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.spelling import type_words, words_for
from torchloom.serve.model.target import Target

Asked = Sequence[Sequence[Any]]
PLAIN = (bool, int, float, str, type(None))
_OF_EACH: Mapping[str, tuple[str, Callable[[str, Tensor], str]]] = {
    "plain": (
        "type({0}) is Tensor",
        lambda path, tensor: (
            f"{path!r} is a {type(tensor).__name__}, and forward asks for types: pass {path}.detach()"
        ),
    ),
    "strides": (
        "is_plainly_laid({0})",
        lambda path, tensor: (
            f"{path!r} has strides {tensor.stride()} for sizes {tuple(tensor.shape)}, and forward asks "
            f"for them: pass {path}.clone(memory_format=torch.contiguous_format)"
        ),
    ),
    "whole": (
        "({0}.storage_offset() == 0 and {0}._base is None)",
        lambda path, tensor: (
            f"{path!r} is a view of another tensor, and forward asks where its memory lies: pass {path}.clone()"
        ),
    ),
}
"""What is asked of each tensor: as Python, and the refusal of a path and a tensor."""
_OUTSIDE = "call the model itself there"


def conditions_of(
    target: Target,
    contract: Contract,
    signature: EntrySignature,
    specs: SpecConditions,
    scope: dict[str, Any],
    *,
    writes: bool,
    asked: Asked,
) -> list[Condition]:
    """Return what calls are asked, in order.

    Args:
        target: what is served.
        contract: what calls have to look like.
        signature: says what arguments are called.
        specs: gets what the contract asks.
        scope: gets what the conditions refer to.
        writes: whether programs write to tensors: no memory may then be passed twice.
        asked: what programs rely on of arguments beside their tensors.

    Raises:
        ValueError: something is asked in a way that no build writes.
    """
    scope |= {"apart": apart, "type_words": type_words, "Tensor": Tensor}
    scope |= {"is_plainly_laid": is_plainly_laid, "inf": math.inf, "nan": math.nan}
    for name, spec in contract.args.items():
        specs.add(name, signature.given[name], spec)
    found = [*_modes(scope), *specs.found]  # in jit's traces, comparisons of sizes are tensors
    if writes and len(specs.tensors) > 1:
        found.append(_apart(specs))
    found += {each.text: each for line in asked for each in _asked(line, specs, signature)}.values()
    others = SpecConditions(scope, ())
    _add_others(others, contract, signature)
    return [*found, *others.found, *_settings(target, contract, scope)]


def _modes(scope: dict[str, Any]) -> Iterator[Condition]:
    """Yield conditions on modes that change what operators do: a program's kernels would not see them."""
    scope |= {
        "function_modes": num_function_modes,
        "dispatch_modes": num_dispatch_modes,
        "transform_level": transform_level,
        "is_jit_tracing": is_jit_tracing,
        "FORWARD": forward,
    }

    def under(_: Values) -> str:
        names = ", ".join([*function_modes(), *dispatch_modes()])
        return f"the call is under {names}, which the program's kernels do not see: {_OUTSIDE}"

    yield Condition(
        "not is_jit_tracing()",
        "the call is inside of torch.jit.trace, which cannot follow the program's kernels: trace the model itself",
    )
    yield Condition("function_modes() == STATE.num_modes", under)
    yield Condition("not dispatch_modes()", under)
    yield Condition(
        "transform_level() is None",
        "the call is inside of a transform of torch.func (vmap, grad, functionalize), whose tensors the program's "
        f"kernels cannot read: {_OUTSIDE}",
    )
    yield Condition(
        "FORWARD._current_level < 0",
        "the call is inside of torch.autograd.forward_ad.dual_level(), and programs have no forward derivatives: "
        f"{_OUTSIDE}",
    )


def _apart(specs: SpecConditions) -> Condition:
    def refusal(given: Values) -> str:
        pairs = itertools.combinations(specs.tensors.items(), 2)
        one, other = next(
            (one, other)
            for (one, (first, _)), (other, (second, _)) in pairs
            if not apart(given[first], given[second])
        )
        return f"{one!r} and {other!r} share memory, and the program may write to it: pass a clone() as one of them"

    return Condition(f"apart({', '.join(name for name, _ in specs.tensors.values())})", refusal)


def _asked(
    line: Sequence[Any], specs: SpecConditions, signature: EntrySignature
) -> Iterator[Condition]:
    """Yield the conditions of one line of what a trace read of its arguments."""
    kind, *rest = line
    tensors = specs.tensors
    if kind == "apart":
        for (one, (first, _)), (other, (second, _)) in itertools.combinations(tensors.items(), 2):
            yield Condition(
                f"{first} is not {second}",
                f"{one!r} and {other!r} are one tensor, and forward tells its arguments apart (with `is`, as keys): "
                "the program is for different ones; pass a view of it as one of them",
            )
    elif kind == "requires_grad":
        for path, (variable, spec) in tensors.items():
            if spec.dtype.is_floating_point:
                yield Condition(
                    f"{variable}.requires_grad is {bool(rest[0])}",
                    _other_gradients(path, is_wanted=rest[0]),
                )
    elif kind in _OF_EACH:
        text, refusal = _OF_EACH[kind]
        for path, (variable, _) in tensors.items():
            yield Condition(
                text.format(variable),
                lambda given, path=path, variable=variable: refusal(path, given[variable]),
            )
    else:
        yield _of_value(kind, rest, signature)


def _other_gradients(path: str, *, is_wanted: bool) -> str:
    does = "does not require" if is_wanted else "requires"
    return (
        f"{path!r} {does} gradients, which forward asks for, and in the trace it was the other way: pass "
        f"{path}.detach(){'.requires_grad_()' if is_wanted else ''}"
    )


def _of_value(kind: str, rest: Sequence[Any], signature: EntrySignature) -> Condition:
    """Return the condition on something that an argument holds."""
    path, *wanted = rest
    root = re.split(r"\W", path, maxsplit=1)[0]
    variable = signature.given.get(root, root)
    text = variable + path[len(root) :]

    def said(words: Callable[[Any], str]) -> Callable[[Values], str]:
        def refusal(given: Values) -> str:
            try:
                value = value_by(text, given)
            except UNLIKE as error:
                return f"{path} is not there ({error}), and the program reads it"
            return f"{path} {words(value)}"

        return refusal

    made = f"the program was made for {wanted[0]!r}"
    if kind == "value":
        return Condition(
            f"same({text}, {wanted[0]!r})",
            said(lambda value: f"is {words_for(value)}, {made}: it is constant in a program"),
        )
    if kind == "type":
        return Condition(
            f"type_words(type({text})) == {wanted[0]!r}",
            said(
                lambda value: f"is {type_words(type(value))}, the program was made for {wanted[0]}"
            ),
        )
    if kind not in ("has", "has own"):
        raise ValueError(f"{kind!r} is nothing that is asked")
    name, was = wanted
    own = f"({name!r} in getattr({text}, '__dict__', ()))"
    has, now = ("no", "with") if was else ("an", "without")
    return Condition(
        f"{own if kind == 'has own' else f'hasattr({text}, {name!r})'} is {bool(was)}",
        said(
            lambda _: (
                f"has {has} attribute {name!r}, which forward looks for, and the program was made {now} it"
            )
        ),
    )


def _add_others(specs: SpecConditions, contract: Contract, signature: EntrySignature) -> None:
    """Ask that arguments of which the contract names no tensors are what they were in the trace."""
    for parameter in signature.parameters:
        name, variable = parameter.name, signature.given[parameter.name]
        if name in contract.args:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            specs.found.append(Condition(f"not {variable}", partial(_more_than_named, variable)))
        elif name in contract.fixed:
            wanted = contract.fixed[name]
            specs.add_value(name, variable, wanted, f"the contract fixes it to {wanted!r}")
        elif parameter.default is not inspect.Parameter.empty:
            why = f"the program is for its default {parameter.default!r}: name it in the contract's `fixed`"
            specs.add_value(name, variable, parameter.default, why)


def _more_than_named(variable: str, given: Values) -> str:
    more = given[variable]
    if isinstance(more, Mapping):
        return f"{next(iter(more))!r} is in no contract: name it in `args` or `fixed`"
    return f"{len(more)} more positional arguments are in no contract"


def _settings(target: Target, contract: Contract, scope: dict[str, Any]) -> Iterator[Condition]:
    """Yield conditions on gradient mode, autocast, the model's mode, and torch's defaults."""
    dtype = torch.get_default_dtype()
    scope |= {
        "is_inference": torch.is_inference_mode_enabled,
        "is_grad_enabled": torch.is_grad_enabled,
        "is_autocast": torch.is_autocast_enabled,
        "default_dtype": torch.get_default_dtype,
        "DTYPE": dtype,
        "HANDLE": RemovableHandle,
    }
    text, refusal = {
        "inference": ("is_inference()", "the contract wants calls under torch.inference_mode()"),
        "no_grad": (
            "not is_grad_enabled()",
            "the contract wants calls under torch.no_grad() or inference_mode()",
        ),
        "grad": (
            "is_grad_enabled()",
            "the contract wants calls with gradients, under torch.enable_grad()",
        ),
    }[contract.grad]
    yield Condition(text, refusal)
    for kind in sorted(target.device_types(contract)):
        yield Condition(
            f"not is_autocast({kind!r})",
            "the program was built without autocast, and the call is under it: enter autocast in the model's forward, "
            "where it becomes part of the program",
        )
    if target.module is not None:
        wanted = "train()" if contract.training else "eval()"
        yield Condition(
            f"MODEL.training is {contract.training}",
            f"the contract wants the model in another mode: call model.{wanted}",
        )
    yield Condition(
        "default_dtype() is DTYPE",
        lambda _: (
            f"torch's default dtype is {torch.get_default_dtype()}, the program was made under {dtype}: build it "
            "again, or set it back"
        ),
    )


def value_by(expression: str, args: Mapping[str, Any]) -> Any:
    """Return what an expression like `batch.parts['x'][0]` stands for, from the arguments of a call."""
    return eval(expression, {"__builtins__": {}}, dict(args))


def apart(*tensors: Tensor) -> bool:
    """Return whether no two of these contiguous tensors share memory."""
    spans = sorted(
        (start := each.data_ptr(), start + each.nbytes) for each in tensors if each.numel()
    )
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def is_plainly_laid(tensor: Tensor) -> bool:
    """Return whether the strides of a contiguous tensor are those of its sizes: those of sizes of 1 may be any.

    Example:
        >>> row = torch.zeros(100, 4)[5:6]
        >>> is_plainly_laid(row), is_plainly_laid(row.as_strided((1, 4), (7, 1)))
        (True, False)
    """
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True
