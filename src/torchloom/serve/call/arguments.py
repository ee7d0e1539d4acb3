"""What a program relies on of its arguments beside their tensors, asked of each call.

A contract says what tensors look like. Forward may read more: a flag of a dataclass, an attribute that somebody set on
a tensor, whether two arguments are one object. The trace's guards on these are stored as data, and become comparisons
in the entry (`conditions`) and refusals in words (`check_asked`).

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

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchloom.errors import ContractError
from torchloom.serve.call.layouts import is_plainly_laid
from torchloom.serve.contract.plain_values import same
from torchloom.serve.contract.specs import TensorSpec
from torchloom.serve.model.spelling import type_words, words_for

Asked = Sequence[Sequence[Any]]

PLAIN = (bool, int, float, str, type(None))
_STEP = re.compile(r"\.(\w+)|\['([^'\\]*)'\]|\[(\d+)\]")
_EXPRESSION = re.compile(r"\w+(?:\.\w+|\['[^'\\]*'\]|\[\d+\])*")


class _OfEach(NamedTuple):
    """Something that is asked of each tensor."""

    condition: str
    """As Python, with a place for the variable."""
    holds: Callable[[Tensor], bool]
    refusal: Callable[[str, Tensor], str]
    """Takes path and tensor."""


_OF_EACH = {
    "plain": _OfEach(
        "type({}) is Tensor",
        lambda tensor: type(tensor) is Tensor,
        lambda path, tensor: (
            f"{path!r} is a {type(tensor).__name__}, and forward asks for types: pass {path}.detach()"
        ),
    ),
    "strides": _OfEach(
        "is_plainly_laid({})",
        is_plainly_laid,
        lambda path, tensor: (
            f"{path!r} has strides {tensor.stride()} for sizes {tuple(tensor.shape)}, and forward asks "
            f"for them: pass {path}.clone(memory_format=torch.contiguous_format)"
        ),
    ),
    "whole": _OfEach(
        "({0}.storage_offset() == 0 and {0}._base is None)",
        lambda tensor: tensor.storage_offset() == 0 and tensor._base is None,
        lambda path, tensor: (
            f"{path!r} is a view of another tensor, and forward asks where its memory lies: pass {path}.clone()"
        ),
    ),
}


def steps_in(expression: str) -> list[str | int]:
    """Return the steps of an expression like `batch.parts['x'][0]`; none if it is of another kind."""
    if not _EXPRESSION.fullmatch(expression):
        return []
    root = re.match(r"\w+", expression)
    steps: list[str | int] = [root[0]] if root else []
    for attribute, key, index in _STEP.findall(expression):
        steps.append(int(index) if index else attribute or key)
    return steps


def value_by(args: Mapping[str, Any], steps: Sequence[str | int]) -> Any:
    """Return what steps lead to, from the arguments of a call."""
    value = args[str(steps[0])]
    for step in steps[1:]:
        is_item = isinstance(step, int) or isinstance(value, Mapping)
        value = value[step] if is_item else getattr(value, str(step))
    return value


def conditions(
    asked: Asked, tensors: Mapping[str, TensorSpec], given: Mapping[str, str] | None = None
) -> list[str]:
    """Return what is asked as Python, over the variables of an entry.

    Args:
        asked: what `asked_of` returned.
        tensors: the variables that hold tensors.
        given: the variables that hold arguments, where these have other names.

    Raises:
        ValueError: something is asked in a way that `asked_of` never writes.
    """
    found: list[str] = []
    for kind, *line in asked:
        if line and isinstance(line[0], str) and steps_in(line[0]):
            root = str(steps_in(line[0])[0])
            line = [(given or {}).get(root, root) + line[0][len(root) :], *line[1:]]
        if kind == "apart":
            found += [f"{one} is not {two}" for one, two in itertools.combinations(tensors, 2)]
        elif kind == "requires_grad":
            floats = [name for name, spec in tensors.items() if spec.dtype.is_floating_point]
            found += [f"{each}.requires_grad is {line[0]}" for each in floats]
        elif kind in _OF_EACH:
            found += [_OF_EACH[kind].condition.format(each) for each in tensors]
        elif not steps_in(line[0]):
            raise ValueError(f"{line[0]!r} is no way to a value")
        elif kind == "value":
            found.append(f"same({line[0]}, {line[1]!r})")
        elif kind == "type":
            found.append(f"type_words(type({line[0]})) == {line[1]!r}")
        elif kind == "has":
            found.append(f"hasattr({line[0]}, {line[1]!r}) is {line[2]!r}")
        elif kind == "has own":
            found.append(f"({line[1]!r} in getattr({line[0]}, '__dict__', ())) is {line[2]!r}")
        else:
            raise ValueError(f"{kind!r} is nothing that is asked")
    return found


def check_asked(asked: Asked, args: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse a call of which something else holds than was asked.

    Args:
        asked: what `asked_of` returned.
        args: the call's.
        tensors: those of the contract, by path.

    Raises:
        ContractError: names it.
    """
    for kind, *line in asked:
        if kind == "apart":
            for (one, first), (other, second) in itertools.combinations(tensors.items(), 2):
                if first is second:
                    raise ContractError(
                        f"{one!r} and {other!r} are one tensor, and forward tells its arguments apart (with `is`, as "
                        "keys): the program is for different ones; pass a view of it as one of them"
                    )
        elif kind == "requires_grad":
            for path, tensor in tensors.items():
                if tensor.is_floating_point() and tensor.requires_grad is not line[0]:
                    raise ContractError(
                        f"{path!r} {'requires' if tensor.requires_grad else 'does not require'} gradients, which "
                        "forward asks for, and in the trace it was the other way: pass "
                        f"{path}.detach(){'' if tensor.requires_grad else '.requires_grad_()'}"
                    )
        elif kind in _OF_EACH:
            for path, tensor in tensors.items():
                if not _OF_EACH[kind].holds(tensor):
                    raise ContractError(_OF_EACH[kind].refusal(path, tensor))
        else:
            _check(kind, line, args)


def _check(kind: str, line: Sequence[Any], args: Mapping[str, Any]) -> None:
    text, *wanted = line
    try:
        value = value_by(args, steps_in(text))
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ContractError(f"{text} is not there ({error}), and the program reads it") from error
    if kind == "value" and not same(value, wanted[0]):
        raise ContractError(
            f"{text} is {words_for(value)}, the program was made for {wanted[0]!r}: it is constant in a program"
        )
    if kind == "type" and type_words(type(value)) != wanted[0]:
        raise ContractError(
            f"{text} is {type_words(type(value))}, the program was made for {wanted[0]}"
        )
    if kind in ("has", "has own"):
        name, was = wanted
        there = hasattr(value, name) if kind == "has" else name in getattr(value, "__dict__", ())
        if there is not was:
            raise ContractError(
                f"{text} has {'an' if there else 'no'} attribute {name!r}, which forward looks for, and the "
                f"program was made {'without' if there else 'with'} it"
            )
