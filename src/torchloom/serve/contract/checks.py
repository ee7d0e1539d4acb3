"""Does a call keep the contract? Each check names the argument, what it is and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ContractError
from torchloom.serve.contract.dims import Size
from torchloom.serve.contract.plain_values import is_plain, same
from torchloom.serve.contract.specs import (
    AnySpec,
    NumberSpec,
    RecordSpec,
    TensorSpec,
)


def argument_at(args: Mapping[str, Any], path: str) -> Any:
    """Return what a path leads to; None where an optional part is not there."""
    value: Any = args
    for part in path.split("."):
        if value is None:
            return None
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, (list, tuple)) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = getattr(value, part, None)
    return value


def check_length(path: str, value: Any, spec: AnySpec) -> None:
    """Refuse a list, tuple or dict that does not hold what its spec names.

    Args:
        path: to the argument, or to the part of it.
        value: what the call passes there.
        spec: what the contract says of it.

    Raises:
        ContractError: it is of another kind, or holds other or more things.
    """
    if not isinstance(spec, RecordSpec):
        return
    if spec.is_ordered and type(value) is not spec.kind:
        wanted = getattr(spec.kind, "__name__", spec.kind)
        raise ContractError(f"{path!r} is a {type(value).__name__}, the contract wants a {wanted}")
    if spec.is_ordered and len(value) != len(spec.parts):
        raise ContractError(
            f"{path!r} holds {len(value)} values, the contract wants {len(spec.parts)}"
        )
    if spec.kind is dict and type(value) is dict and [*value] != [*spec.parts]:
        raise ContractError(
            f"{path!r} holds the keys {[*value]}, the contract wants {[*spec.parts]}, in this order: forward "
            "may go through them"
        )
    for key, each in spec.parts.items():
        check_length(f"{path}.{key}", argument_at({"": value}, f".{key}"), each)


def check_tensor(path: str, value: Any, spec: TensorSpec) -> None:
    """Refuse a value that is not the tensor that the contract describes; sizes are not looked at.

    Args:
        path: to the tensor in the arguments.
        value: what the call passes there.
        spec: what the contract says of it.

    Raises:
        ContractError: it is no tensor, or of another layout, rank, dtype or device.
    """
    if not isinstance(value, Tensor):
        raise ContractError(f"{path!r} is {type(value).__name__}, the contract wants {spec}")
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise ContractError(
            f"{path!r} is a tensor of another layout ({kind}), the contract wants a dense one: {spec}"
        )
    if value.dim() != len(spec.shape):
        raise ContractError(
            f"{path!r} has {value.dim()} dimensions, the contract wants {len(spec.shape)}: {spec}"
        )
    if value.dtype != spec.dtype:
        raise ContractError(f"{path!r} is {value.dtype}, the contract wants {spec.dtype}")
    if not value.is_contiguous():
        raise ContractError(
            f"{path!r} is not contiguous (strides {tuple(value.stride())} for sizes "
            f"{tuple(value.shape)}): call .contiguous() on it first"
        )
    if value.is_neg() or value.is_conj():
        kind = "neg" if value.is_neg() else "conj"
        raise ContractError(
            f"{path!r} is a view whose values are changed as they are read: call .resolve_{kind}() on it first"
        )
    if value.device != spec.device:
        raise ContractError(f"{path!r} is on {value.device}, the contract wants {spec.device}")


def check_number(path: str, value: Any, spec: NumberSpec, sizes: dict[str, int]) -> None:
    """Refuse a number that is out of range.

    Args:
        path: to the number in the arguments.
        value: what the call passes there.
        spec: what the contract says of it.
        sizes: of the call, by dim, as far as they are known; a whole number is added to them.

    Raises:
        ContractError: it is of another type, or out of range.
    """
    kind = float if spec.size is None else int
    if type(value) is not kind:
        raise ContractError(f"{path!r} is {value!r}, the contract wants {spec}")
    if spec.size is not None:
        check_size(repr(path), int(value), spec.size, sizes)
    elif not spec.low <= value <= spec.high:
        raise ContractError(f"{path!r} is {value!r}, the contract allows {spec.low} to {spec.high}")


def check_size(what: str, size: int, wanted: Size, sizes: dict[str, int]) -> None:
    """Refuse a size that the contract does not allow, or that is another one elsewhere in the call.

    Args:
        what: the size, in words.
        size: of the call.
        wanted: what the contract says of it.
        sizes: of the call, by dim, as far as they are known; this one is added to them.

    Raises:
        ContractError: it is not allowed.
    """
    if isinstance(wanted, int):
        if size != wanted:
            raise ContractError(f"{what} is {size}, the contract fixes it to {wanted}")
        return
    dim = wanted.dim
    value = wanted.value_at(size)
    if value is None:
        allowed = dim.range_text if wanted is dim else f"it for {dim}"
        raise ContractError(f"{what} ({wanted.text}) is {size}, the contract allows {allowed}")
    if sizes.setdefault(dim.name, value) != value:
        raise ContractError(
            f"{what} ({wanted.text}) is {size}, elsewhere in the call it is "
            f"{wanted.of(sizes[dim.name])}"
        )


def is_fixed_value(one: Any, other: Any) -> bool:
    """Return whether an argument is the value that the contract fixes it to."""
    return one is other or (is_plain(one) and same(one, other))
