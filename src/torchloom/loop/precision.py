"""Cast the inputs of a model to its compute dtype, and give the dtypes that configs name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchloom.config import PrecisionConfig
from torchloom.shard import Precision

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that a config calls "fp32", "bf16" or "fp16"."""
    return _DTYPES[name]


def shard_precision(config: PrecisionConfig) -> Precision:
    """Return how parameters are kept, computed with and reduced."""
    compute = None if config.dtype == "fp32" else dtype_of(config.dtype)
    # fp32 is what follows where nothing is written: then float64 stays.
    return Precision(
        master="wide" if compute is None else dtype_of(config.master),
        compute=compute,
        reduce=None if config.reduce_dtype == config.master else dtype_of(config.reduce_dtype),
    )


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested lists, tuples, mappings and dataclasses.

    Containers keep their class; one without anything to cast is returned itself.

    Example:
        >>> cast_inputs({"x": torch.ones(2), "n": 3}, torch.bfloat16)
        {'x': tensor([1., 1.], dtype=torch.bfloat16), 'n': 3}
    """
    return _cast(value, dtype)[0]


def _cast(value: Any, dtype: torch.dtype) -> tuple[Any, bool]:
    """Return what becomes of a value, and whether it is another: Dynamo cannot compare containers by identity."""
    if isinstance(value, Tensor):
        is_cast = value.is_floating_point() and value.dtype != dtype
        return (value.to(dtype), True) if is_cast else (value, False)
    is_changed = False
    if isinstance(value, MutableMapping):
        changed = _changed(value.items(), dtype)
        is_changed = bool(changed)
        value = _with_items(value, changed)
    if isinstance(value, (list, tuple)):
        changed = _changed(enumerate(value), dtype)
        if not changed:
            return value, is_changed
        items = [changed.get(index, item) for index, item in enumerate(value)]
        return value._make(items) if hasattr(value, "_make") else type(value)(items), True  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]
        changed = _changed(((n, getattr(value, n)) for n in names), dtype)
        return _with_fields(value, changed), is_changed or bool(changed)
    return value, is_changed


def cast_around(model: nn.Module, precision: Precision) -> Iterator[RemovableHandle]:
    """Cast a module's inputs before each of its forward passes, and results behind it, until the hooks are removed."""
    compute, output = precision.compute, precision.output
    if compute is not None:

        def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return cast_inputs(args, compute), cast_inputs(kwargs, compute)

        yield model.register_forward_pre_hook(before, with_kwargs=True)
    if output is not None:

        def behind(_module: nn.Module, _args: Any, result: Any) -> Any:
            return cast_inputs(result, output)

        yield model.register_forward_hook(behind)


def _changed(items: Iterable[tuple[Any, Any]], dtype: torch.dtype) -> dict[Any, Any]:
    """Return what becomes of those items that are cast, or hold something that is."""
    cast = ((key, *_cast(item, dtype)) for key, item in items)
    return {key: new for key, new, is_changed in cast if is_changed}


def _with_items(value: MutableMapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with some items replaced: of its class, with its attributes."""
    if not changed:
        return value
    if type(value) is dict:
        return {**value, **changed}  # Dynamo traces this, and breaks at `copy.copy`
    if dataclasses.is_dataclass(value):
        # Outputs of transformers: of a copy, Dynamo (torch 2.13) hands out an object without the other items.
        return type(value)(**{**value, **changed})
    made = copy.copy(value)
    for key, item in changed.items():
        made[key] = item
    return made


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    """Return a copy of a dataclass with some fields replaced, also of a frozen one."""
    if not changed:
        return value
    made = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(made, name, item)
    return made


def autocasting(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return what forward runs in: autocast where the config asks for it; the caller's own stays."""
    if config.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, dtype_of(config.autocast.dtype))
