"""What the time of a node depends on, as text: operator, shapes, dtypes, strides, integers.

    aten.mm(f32[1024, 512], f32[512, 1408]{1, 512}) on cpu

Numbers that are only added or multiplied do not matter and are left out; integers and booleans
(dimensions, masks) do. Contiguous strides are not spelled out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchloom._torch import layout_hint, size_hint
from torchloom.graph import tensors_in, value_of
from torchloom.graph.text import short_dtype, target_name


def node_key(node: fx.Node) -> str:
    """Return the signature of a node whose values tracing has recorded."""
    args = [value_text(each) for each in fx.node.map_arg(node.args, value_of)]
    kwargs: dict[str, Any] = fx.node.map_arg(node.kwargs, value_of)  # type: ignore[assignment]
    args += [f"{key}={value_text(each)}" for key, each in kwargs.items()]
    return f"{target_name(node.target)}({', '.join(args)}) on {device_of(node).type}"


def device_of(node: fx.Node) -> torch.device:
    """Return the device that a node runs on."""
    values = [value_of(node), *(value_of(used) for used in node.all_input_nodes)]
    for value in values:
        for tensor in tensors_in(value):
            return tensor.device
    return torch.device("cpu")


def value_text(value: Any) -> str:
    """Return what the time of an operator depends on in one of its arguments."""
    if isinstance(value, torch.Tensor):
        shape, strides, _ = layout_hint(value)
        layout = "" if strides == _contiguous(shape) else f"{{{', '.join(map(str, strides))}}}"
        return f"{short_dtype(value.dtype)}[{', '.join(map(str, shape))}]{layout}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(value_text(each) for each in value)}]"
    if isinstance(value, torch.SymInt):
        return str(size_hint(value))
    if isinstance(value, (torch.SymFloat, float)):
        return "number"
    if isinstance(value, torch.dtype):
        return short_dtype(value)
    return str(value)


def _contiguous(shape: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
