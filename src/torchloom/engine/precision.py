"""Dtypes by their config names, inputs cast to the compute dtype, and autocast."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.config import PrecisionConfig
from torchloom.errors import ConfigError
from torchloom.shard import Layout, Precision, class_of

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that a config calls "fp32", "bf16" or "fp16"."""
    return _DTYPES[name]


def shard_precision(config: PrecisionConfig) -> Precision:
    """Return how parameters are kept, computed with and reduced."""
    compute = None if config.dtype == "fp32" else dtype_of(config.dtype)
    return Precision(master=torch.float32, compute=compute, reduce=dtype_of(config.reduce_dtype))


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_inputs(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(cast_inputs(item, dtype) for item in value)
    return value


def autocasting(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return what forward runs in: autocast where the config asks for it; the caller's own stays."""
    if config.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, dtype_of(config.autocast.dtype))


def cast_params(
    config: PrecisionConfig, model: nn.Module, layout: Layout
) -> tuple[str, ...] | None:
    """Return the parameters that may be cast before they travel; None: all.

    Args:
        config: names classes of modules.
        model: sharded or not.
        layout: of its parameters.

    Raises:
        ConfigError: there is no such class.
    """
    if config.autocast is None or config.autocast.modules is None:
        return None
    classes = {_class_named(name) for name in config.autocast.modules}
    safe = {path for path, module in model.named_modules() if class_of(module) in classes}
    return tuple(spec.name for spec in layout if any(owner.module in safe for owner in spec.owners))


def _class_named(name: str) -> type[nn.Module]:
    """Return a class; it has been imported, or no module of the model would be of it."""
    package, _, last = name.rpartition(".")
    found = getattr(sys.modules.get(package), last, None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    raise ConfigError(
        f"torch_autocast.lower_precision_safe_modules: {name!r} is no class of modules that has been "
        "imported; write package.Class, as in torch.nn.Linear"
    )
