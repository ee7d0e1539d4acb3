"""Dtypes by their config names, and inputs cast to the compute dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchloom.config import PrecisionConfig
from torchloom.shard import Precision

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
