"""Which functions choose what a checkpoint keeps, as text that is equal where they choose the same.

Layers that are checkpointed with different policies keep different values: one body would have the memory of one of them.
"""

from __future__ import annotations

import enum
import functools
import types
from typing import Any

import torch

from torchloom._torch.operators import OpOverload
from torchloom.bytecode import code_digest
from torchloom.errors import RegionError

_PLAIN = (
    enum.Enum,
    bool,
    int,
    float,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    OpOverload,
)


def choice_text(value: Any) -> str:
    """Return text that is equal in every process for functions that do the same with the same values.

    Args:
        value: the `context_fn` of a checkpoint, or something that it holds.

    Raises:
        RegionError: it holds an object of which this is not known.
    """
    try:
        return _text(value)
    except RecursionError:
        raise RegionError(
            "what a checkpoint keeps depends on a function that holds itself"
        ) from None


def _text(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value}"
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    held = [_text(each) for each in _held(value)]
    if isinstance(value, (set, frozenset)):
        held.sort()
    return f"{_name(value)}[{', '.join(held)}]"


def _name(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__} {code_digest(value.__code__)}"
    return type(value).__name__


def _held(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [*cells, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    raise RegionError(f"what a checkpoint keeps depends on an object of {type(value).__name__}")
