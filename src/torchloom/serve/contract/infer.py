"""A contract from annotations and from the arguments of a first call, for decorated classes."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ServeError
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.dims import Derived, Dim, Size
from torchloom.serve.contract.specs import RecordSpec, TensorSpec

Varying = dict[int, Dim | Derived | str | None]
"""Which sizes of an argument vary, and the dim or its name where given."""
Dims = dict[str, Varying]

_TENSOR = re.compile(
    r"^(?:typing\.)?(?:Optional\[)?(?:torch\.)?(?:[A-Z]\w*)?Tensor\]?(?:\s*\|\s*None)?$"
)


def named_dims(forward: Callable[..., Any], given: Mapping[str, Any] | None) -> Dims:
    """Return which sizes of which arguments vary.

    Args:
        forward: the method; its first parameter is the model.
        given: by the user; from annotations if None.

    Raises:
        ServeError: a name is no argument, or nothing varies.
    """
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    names = [parameter.name for parameter in parameters]
    if given is None:
        found: Dims = {name: {0: None} for name in _annotated(forward, parameters)}
        if not found:
            raise ServeError(
                f"no argument of {forward.__qualname__} is annotated as a tensor: annotate them, or give "
                "dynamic_arg_dims"
            )
        return found
    for name in given:
        if name not in names:
            raise ServeError(
                f"{name!r} is no argument of {forward.__qualname__}, which takes {', '.join(names)}"
            )
    return {name: _dims(name, dims) for name, dims in given.items()}


def contract_of_call(
    forward: Callable[..., Any],
    dims: Dims,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    training: bool,
) -> Contract:
    """Return the contract that a first call stands for: its sizes are the largest.

    Sizes that are equal in it are one dim, unless they have names.

    Args:
        forward: the bound method.
        dims: which sizes vary, as `named_dims` returns them.
        args: of the call.
        kwargs: of the call.
        training: whether modules are in training mode.

    Raises:
        ServeError: an argument whose size varies is no tensor.
    """
    bound = inspect.signature(forward).bind(*args, **kwargs)
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        is_rest = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        given |= value if is_rest else {name: value}
    specs: dict[str, TensorSpec | RecordSpec] = {}
    fixed: dict[str, Any] = {}
    for name, value in given.items():
        spec = _described(name, value, dims.get(name, {}))
        if spec is not None:
            specs[name] = spec
        elif dims.get(name) and value is not None:
            raise ServeError(
                f"{name!r} is {type(value).__name__}, but dynamic_arg_dims says that its size varies: only "
                "tensors, and dicts, lists, tuples and dataclasses of tensors, can vary"
            )
        else:
            fixed[name] = value
    grad = "grad" if torch.is_grad_enabled() else "no_grad"
    contract = Contract(specs, fixed=fixed, grad=grad, training=training)
    contract.is_of_call = True
    return contract


def _described(path: str, value: Any, varying: Varying) -> TensorSpec | RecordSpec | None:
    """Return what an argument looks like; None if it is no tensor and holds none, or other things as well."""
    if isinstance(value, Tensor):
        return _spec(path, value, varying)
    kind: Any = type(value)
    parts: dict[str, Any] = {}
    if isinstance(value, dict):
        kind, parts = dict, value
    elif kind in (list, tuple):
        parts = {str(place): each for place, each in enumerate(value)}
    elif dataclasses.is_dataclass(kind):
        parts = {each.name: getattr(value, each.name) for each in dataclasses.fields(kind)}
    found = {key: _described(f"{path}.{key}", each, varying) for key, each in parts.items()}
    specs = {key: spec for key, spec in found.items() if spec is not None}
    return RecordSpec(specs, kind) if specs and len(specs) == len(found) else None


def _spec(path: str, value: Tensor, varying: Varying) -> TensorSpec:
    shape: list[Size] = list(value.shape)
    for number, dim in varying.items():
        if not -value.dim() <= number < value.dim():
            raise ServeError(
                f"dynamic_arg_dims names size {number} of {path!r}, which has {value.dim()} dimensions"
            )
        size = value.shape[number]
        is_size = isinstance(dim, (Dim, Derived))
        shape[number] = dim if is_size else Dim(dim or f"size_{size}", min(1, size), size)
    return TensorSpec(tuple(shape), value.dtype, value.device)


def _dims(name: str, given: Any) -> Varying:
    if isinstance(given, bool) or given is None:
        raise ServeError(f"dynamic_arg_dims[{name!r}] is {given!r}: give a number, or several")
    if isinstance(given, int):
        return {given: None}
    return dict(given) if isinstance(given, Mapping) else dict.fromkeys(given)


def _annotated(forward: Callable[..., Any], parameters: Iterable[inspect.Parameter]) -> list[str]:
    try:
        hints = typing.get_type_hints(forward)
    except (NameError, TypeError, AttributeError):  # names that exist for type checkers alone
        hints = {}
    return [
        parameter.name
        for parameter in parameters
        if _is_tensor(hints.get(parameter.name, parameter.annotation))
    ]


def _is_tensor(annotation: Any) -> bool:
    """Say whether an annotation is a tensor, an optional one, or a dict, list, tuple or dataclass of them."""
    if isinstance(annotation, str):
        return bool(_TENSOR.match(annotation.strip().strip("'\"")))
    is_legacy = isinstance(annotation, type(torch.LongTensor))  # which is no subclass of Tensor
    if is_legacy or (isinstance(annotation, type) and issubclass(annotation, Tensor)):
        return True
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is not None and type(None) in args:
        rest = [each for each in args if each is not type(None)]
        return len(rest) == 1 and _is_tensor(rest[0])
    if origin in (dict, Mapping, list, tuple):
        held = [each for each in (args if origin in (list, tuple) else args[1:]) if each is not ...]
        return bool(held) and all(map(_is_tensor, held))
    if dataclasses.is_dataclass(annotation):
        parts = dataclasses.fields(annotation)
        return bool(parts) and all(_is_tensor(each.type) for each in parts)
    return False
