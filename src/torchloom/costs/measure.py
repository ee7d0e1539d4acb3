"""Measuring operators one at a time, on fresh random tensors of the recorded shapes.

The user's graph never runs, nor do its tensors: each operator is called alone, in memory of its
own. Operators that write, communicate or come from elsewhere than torch are left to the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchloom._torch.operators import OpOverload
from torchloom._torch.tensors import layout_hint, size_hint
from torchloom.costs.roofline import is_computed, node_traffic_bytes
from torchloom.costs.signature import device_of
from torchloom.costs.timing import median_us
from torchloom.graph import value_of

MAX_BYTES = 2 << 30
"""Operators that move more than this are not measured: their tensors could exhaust the memory."""

aten = torch.ops.aten
# Which argument is looked into, and along which of its dimensions, by an operator's integers.
_TABLES = {
    aten.embedding.default: 0,
    aten.index.Tensor: 0,
    aten._unsafe_index.Tensor: 0,
    aten.index_select.default: 0,
    aten.gather.default: 0,
    aten.scatter.src: 0,
    aten.scatter.value: 0,
    aten.scatter_add.default: 0,
    aten.index_put.default: 0,
}


def can_measure(node: fx.Node) -> bool:
    """Say whether a node may be run alone: it computes, writes nothing and is torch's own."""
    target = node.target
    if not is_computed(node) or not isinstance(target, OpOverload):
        return False
    if target.namespace not in ("aten", "prims") and target._schema.name != "torchloom::matmul":
        return False
    return not target._schema.is_mutable and node_traffic_bytes(node) <= MAX_BYTES


def measure_node(node: fx.Node, budget_s: float = 0.1) -> float | None:
    """Return the median time of an operator in microseconds, None if it cannot be run alone.

    Random number generators are left as they were.

    Args:
        node: a node whose values tracing has recorded.
        budget_s: seconds to spend, about.
    """
    if not can_measure(node):
        return None
    device = device_of(node)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        bound = _index_bound(node)
        target: Any = node.target
        try:
            args = fx.node.map_aggregate(
                fx.node.map_arg(node.args, value_of), lambda value: _fresh(value, bound)
            )
            kwargs: Any = fx.node.map_aggregate(
                fx.node.map_arg(node.kwargs, value_of), lambda value: _fresh(value, bound)
            )
            return median_us(lambda: target(*args, **kwargs), device, budget_s)
        except (RuntimeError, IndexError, ValueError):
            # Its inputs have a meaning that random ones lack, or the device has no memory for them.
            return None


def _index_bound(node: fx.Node) -> int:
    """Return a bound below which every integer is a valid index."""
    at = _TABLES.get(node.target)  # type: ignore[arg-type]
    if at is None:
        return 1
    table: Any = node.args[at]
    sizes = [size_hint(size) for size in value_of(table).shape]
    # An embedding looks along its first dimension; others may look along any.
    return max(1, sizes[0] if node.target is aten.embedding.default else min(sizes, default=1))


def _fresh(value: Any, index_bound: int) -> Any:
    """Return random data in the place of a fake tensor, and sizes in the place of symbols."""
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides, length = layout_hint(value)
    return _random(length, value.dtype, value.device, index_bound).as_strided(shape, strides)


def _random(
    length: int, dtype: torch.dtype, device: torch.device, index_bound: int
) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, (length,), device=device).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(length, device=device).to(dtype)
    return torch.randint(0, index_bound, (length,), device=device).to(dtype)
