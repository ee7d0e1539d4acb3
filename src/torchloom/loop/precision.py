"""Cast the inputs of a model to its compute dtype, and give the dtypes that configs name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchloom.config import PrecisionConfig
from torchloom.shard import Precision
from torchloom.shard.nested import map_tensors

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

    def cast(tensor: Tensor) -> Tensor | None:
        is_cast = tensor.is_floating_point() and tensor.dtype != dtype
        return tensor.to(dtype) if is_cast else None

    return map_tensors(value, cast)


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


def autocasting(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return what forward runs in: autocast where the config asks for it; the caller's own stays."""
    if config.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, dtype_of(config.autocast.dtype))
