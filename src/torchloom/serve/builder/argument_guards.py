"""What a trace relied on of its arguments, from Dynamo's guards and the traced code.

A guard on an argument is either implied by the contract, or becomes a question that each call is asked
(`call.conditions`). A guard that is neither refuses the build. Dynamo has no guards on some properties of
tensors (strides, identity, `requires_grad`): code that names them is found by its bytecode.
"""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from torchloom._torch.full_capture import GuardOn
from torchloom.errors import ServeError
from torchloom.serve.call.conditions import PLAIN, value_by
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.specs import AnySpec, NumberSpec
from torchloom.serve.model.facts import readable
from torchloom.serve.model.spelling import type_words
from torchloom.serve.model.target import Target

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
    specs = {code: spec for _, code, spec in contract.places()}
    fixed = [
        spec for _, spec in contract.numbers() if spec.size and spec.size.dim.name not in varying
    ]
    found: list[list[Any]] = []
    for guard in guards:
        root = next((each for each in sources if guard.source.startswith(each)), None)
        if root is None:
            continue
        expression = sources[root] + guard.source[len(root) :]
        line = _line(guard, expression, specs.get(expression), args, fixed)
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
    spec: AnySpec | None,
    args: Mapping[str, Any],
    fixed: Collection[AnySpec],
) -> list[Any] | None:
    """Return what one guard asks of calls; None where the contract does."""
    known = spec is not None
    if known and (guard.kind in _OF_THE_CONTRACT or spec in fixed):
        return None
    if isinstance(spec, NumberSpec):
        raise ServeError(
            f"{readable(guard.source)} varies in the contract ({spec}), and forward makes a constant of it: give it "
            "as `fixed`, or as a tensor of one number"
        )
    try:
        value, is_there = value_by(expression, args), True
    except Exception:  # noqa: BLE001 - attributes may raise anything, and Dynamo has names of its own
        value, is_there = None, False
    if known and value is None:  # an optional tensor, of which there are programs without
        return None
    if is_there and guard.kind == "HASATTR":
        return ["has", expression, guard.name, hasattr(value, guard.name)]
    if is_there and guard.kind == "NOT_PRESENT_IN_GENERIC_DICT":
        return ["has own", expression, guard.name, guard.name in getattr(value, "__dict__", {})]
    if is_there and type(value) in PLAIN:
        return ["value", expression, value]
    if is_there and guard.kind == "TYPE_MATCH":
        return ["type", expression, type_words(type(value))]
    raise ServeError(
        f"forward relies on {readable(guard.source)} ({guard.kind}), of which the contract says nothing and calls "
        "cannot be asked: name it as a tensor, or leave numbers and texts there"
    )


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
