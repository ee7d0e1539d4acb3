"""What a trace relied on of its arguments beside their tensors, asked of each call.

A contract says what tensors look like. Forward may read more: a flag of a dataclass, an attribute that somebody
set on a tensor, whether two arguments are one object. Dynamo guards all of it, and so does a program: each such
guard is one thing that calls are asked, written as data.

    ["value", "batch.causal", False]      batch.causal is False
    ["type", "batch.options", "m.Opts"]   it is an object of that class
    ["has", "x", "scale", False]          x has no attribute scale
    ["apart"]                             no tensor is passed twice: forward tells objects apart
    ["plain"]                             tensors are no parameters of any model: forward asks for types
    ["strides"]                           strides are those of the sizes, where a size is 1 as well
    ["requires_grad", False]              no tensor requires gradients
    ["whole"]                             tensors are no views of others, and begin where their memory does
"""

from __future__ import annotations

import dis
import itertools
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchloom._torch.full_capture import GuardOn
from torchloom.errors import ContractError, ServeError
from torchloom.serve.contract import Contract
from torchloom.serve.facts import readable
from torchloom.serve.same import is_plainly_laid, same
from torchloom.serve.specs import AnySpec, NumberSpec, RecordSpec, TensorSpec
from torchloom.serve.target import Target
from torchloom.serve.words import type_words, words_for

Asked = Sequence[Sequence[Any]]

_PLAIN = (bool, int, float, str, type(None))
_STEP = re.compile(r"\.(\w+)|\['([^'\\]*)'\]|\[(\d+)\]")
_EXPRESSION = re.compile(r"\w+(?:\.\w+|\['[^'\\]*'\]|\[\d+\])*")
_OF_THE_CONTRACT = frozenset(
    {
        *("TYPE_MATCH", "TENSOR_MATCH", "DUPLICATE_INPUT", "DYNAMIC_INDICES", "SHAPE_ENV"),
        *("SEQUENCE_LENGTH", "LIST_LENGTH", "DICT_LENGTH", "DICT_VERSION"),
        *("DICT_KEYS_MATCH", "DICT_KEYS", "DICT_CONST_KEYS", "MAPPING_KEYS_CHECK"),
        *("DICT_CONTAINS", "DICT_NOT_CONTAINS"),
    }
)
"""What is asked of tensors, and of the dicts, lists and objects that hold them, in any case."""
_TYPES = frozenset({"type", "__class__", "Parameter", "Buffer"})
_LAYOUTS = frozenset({"stride", "as_strided", "is_contiguous"})
"""Names in code that asks for more than sizes of a tensor."""
_MEMORY = frozenset(
    {"as_strided", "storage_offset", "untyped_storage", "storage", "_base", "_is_view"}
)
"""Names in code that asks where in memory a tensor lies."""


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
_TORCH = str(Path(torch.__file__).parent)


def asked_of(
    guards: Iterable[GuardOn],
    codes: Iterable[types.CodeType],
    target: Target,
    contract: Contract,
    args: Mapping[str, Any],
    varying: Collection[str],
) -> list[list[Any]]:
    """Return what a trace relied on of its arguments.

    Args:
        guards: of the trace.
        codes: the functions that were traced.
        target: says how arguments are called in guards.
        contract: whose tensors, and what holds them, are asked for anyway.
        args: of the trace.
        varying: the dims that vary in it.

    Raises:
        ServeError: it relied on an object that nothing can be said of.
    """
    given = {name: args[name] for name in contract.args if name in args}
    sources = {
        source: name for name, its in target.sources_by_name(given).items() for source in its
    }
    fixed = [
        spec for _, spec in contract.numbers() if spec.size and spec.size.dim.name not in varying
    ]
    found: list[list[Any]] = []
    for guard in guards:
        root = next((each for each in sources if guard.source.startswith(each)), None)
        if root is None:
            continue
        expression = sources[root] + guard.source[len(root) :]
        line = _line(guard, expression, contract, args, fixed)
        if line is not None and line not in found:
            found.append(line)
    own = [code for code in codes if not code.co_filename.startswith(_TORCH)]
    if any(map(_compares_objects, own)):
        found += [["apart"], ["plain"]]
    elif any(_TYPES & set(code.co_names) for code in own):
        found.append(["plain"])
    if any(_LAYOUTS & set(code.co_names) for code in own):
        found.append(["strides"])
    if any(_MEMORY & set(code.co_names) for code in own):
        found.append(["whole"])
    if any(map(_asks_for_gradients, own)):
        found.append(["requires_grad", contract.grad == "grad"])
    return found


def _line(
    guard: GuardOn,
    expression: str,
    contract: Contract,
    args: Mapping[str, Any],
    fixed: Collection[AnySpec],
) -> list[Any] | None:
    """Return what one guard asks of calls; None where the contract does."""
    steps = _steps(expression)
    spec = _named(contract, steps)
    known = spec is not None
    if known and (guard.kind in _OF_THE_CONTRACT or spec in fixed):
        return None
    if isinstance(spec, NumberSpec):
        raise ServeError(
            f"{readable(guard.source)} varies in the contract ({spec}), and forward makes a constant of it: give it "
            "as `fixed`, or as a tensor of one number"
        )
    try:
        value = _value(args, steps)
    except (AttributeError, KeyError, IndexError, TypeError):
        steps, value = [], None
    if known and value is None:  # an optional tensor, of which there are programs without
        return None
    if steps and guard.kind == "HASATTR":
        return ["has", expression, guard.name, hasattr(value, guard.name)]
    if steps and guard.kind == "NOT_PRESENT_IN_GENERIC_DICT":
        return ["has own", expression, guard.name, guard.name in getattr(value, "__dict__", {})]
    if steps and type(value) in _PLAIN:
        return ["value", expression, value]
    if steps and guard.kind == "TYPE_MATCH":
        return ["type", expression, type_words(type(value))]
    raise ServeError(
        f"forward relies on {readable(guard.source)} ({guard.kind}), of which the contract says nothing and calls "
        "cannot be asked: name it as a tensor, or leave numbers and texts there"
    )


def _steps(expression: str) -> list[str | int]:
    """Return the steps of an expression like `batch.parts['x'][0]`; none if it is of another kind."""
    if not _EXPRESSION.fullmatch(expression):
        return []
    root = re.match(r"\w+", expression)
    steps: list[str | int] = [root[0]] if root else []
    for attribute, key, index in _STEP.findall(expression):
        steps.append(int(index) if index else attribute or key)
    return steps


def _named(contract: Contract, steps: Sequence[str | int]) -> AnySpec | None:
    """Return what a contract says of what steps lead to, if it names it."""
    if not steps:
        return None
    spec = contract.args[str(steps[0])]
    for step in steps[1:]:
        if not isinstance(spec, RecordSpec) or str(step) not in spec.parts:
            return None
        spec = spec.parts[str(step)]
    return spec


def _value(args: Mapping[str, Any], steps: Sequence[str | int]) -> Any:
    value = args[str(steps[0])]
    for step in steps[1:]:
        is_item = isinstance(step, int) or isinstance(value, Mapping)
        value = value[step] if is_item else getattr(value, str(step))
    return value


def _compares_objects(code: types.CodeType) -> bool:
    """Say whether code compares objects by identity, constants such as None aside."""
    if "id" in code.co_names:
        return True
    before = ["", ""]
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and not any(n.startswith("LOAD_CONST") for n in before):
            return True
        before = [before[1], instruction.opname]
    return False


def _asks_for_gradients(code: types.CodeType) -> bool:
    """Say whether code asks a tensor, other than a method one of its own object, whether it requires gradients."""
    before: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.argval in ("requires_grad", "is_leaf", "grad_fn"):
            steps = list(itertools.takewhile(lambda i: i.opname == "LOAD_ATTR", reversed(before)))
            root = before[-1 - len(steps)].argval if len(before) > len(steps) else None
            is_own = bool(steps) and root == "self" and code.co_varnames[:1] == ("self",)
            if not is_own:
                return True
        before.append(instruction)
    return False


def conditions(
    asked: Asked, tensors: Mapping[str, TensorSpec], given: Mapping[str, str] | None = None
) -> list[str]:
    """Return what is asked as Python, over the variables of an entry.

    Args:
        asked: what `asked_of` returned.
        tensors: the variables that hold tensors.
        given: the variables that hold arguments, where these have other names.
    """
    found: list[str] = []
    for kind, *line in asked:
        if line and isinstance(line[0], str) and _steps(line[0]):
            root = str(_steps(line[0])[0])
            line = [(given or {}).get(root, root) + line[0][len(root) :], *line[1:]]
        if kind == "apart":
            found += [f"{one} is not {two}" for one, two in itertools.combinations(tensors, 2)]
        elif kind == "requires_grad":
            floats = [name for name, spec in tensors.items() if spec.dtype.is_floating_point]
            found += [f"{each}.requires_grad is {line[0]}" for each in floats]
        elif kind in _OF_EACH:
            found += [_OF_EACH[kind].condition.format(each) for each in tensors]
        elif not _steps(line[0]):
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
        value = _value(args, _steps(text))
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
