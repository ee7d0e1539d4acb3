"""Costs from first principles: FLOPs over the rate of products, bytes over the rate of memory.

    time = launch + max(FLOPs / gemm rate, bytes / memory rate)

FLOPs of products, convolutions and attention, forward and backward, are torch's own formulas
(`torch.utils.flop_counter`), with more for CPU attention, products of experts, our own product and decompositions, which
optimizers use (few devices do these at the rate of products). All else moves bytes: what it reads
plus what it writes. Views cost nothing. Sizes that are not known count as what the trace saw.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from torchloom._torch.operators import OpOverload
from torchloom._torch.tensors import size_hint
from torchloom.costs.hardware import Device
from torchloom.graph import argument, is_view_op, tensors_in, value_of
from torchloom.ops.losses import chunked_loss

aten = torch.ops.aten

# Reads only the rows that it returns, not the whole table.
_PICKS = frozenset(
    {
        aten.embedding.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten._unsafe_index.Tensor,
    }
)
# Views without an alias in their schema, allocations without a write, and bookkeeping.
_FREE = frozenset(
    {
        aten._unsafe_view.default,
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.lift_fresh_copy.default,
        operator.getitem,
    }
)
_ATTENTION = "_dot_product_", "_flash_attention", "_efficient_attention", "flex_attention"


def roofline_us(node: fx.Node, device: Device) -> float:
    """Return the modelled time of one node of a captured graph, in microseconds.

    Communication of ours takes no time on the compute engine: see `collective_us`. Nodes that
    compute nothing (inputs, views, sizes) are free.

    Args:
        node: a node whose values tracing has recorded (`meta["val"]`).
        device: whose rates count.
    """
    if not is_computed(node):
        return 0.0
    moved_us = 1e6 * node_traffic_bytes(node) / device.memory_bytes_per_s
    flops = node_flops(node)
    if not flops:
        return device.launch_us + moved_us
    rate = device.flops_of(_dtype_of(node))
    if _is_attention(node):
        rate *= device.attention_fraction
    return device.launch_us + max(1e6 * flops / rate, moved_us)


def kind_of_work(node: fx.Node) -> str:
    """Return "attention", "products" for other work that is counted in FLOPs, or "elementwise"."""
    if _is_attention(node):
        return "attention"
    return "products" if node_flops(node) else "elementwise"


def _is_attention(node: fx.Node) -> bool:
    return any(mark in str(_call_of(node)[0]) for mark in _ATTENTION)


def _call_of(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return operator and arguments of a call, of the one inside where it takes a generator's state.

    So graphs for CUDA call what draws or may draw, as flash attention, and is computed again in backward.
    """
    if str(node.target) != "graphsafe_run_with_rng_state":
        return node.target, node.args, node.kwargs
    kwargs = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    return node.args[0], node.args[1:], kwargs


def is_computed(node: fx.Node) -> bool:
    """Say whether a node does work on the compute engine."""
    if node.op != "call_function" or node.target in _FREE or not _has_tensors(node):
        return False
    target = node.target
    if not isinstance(target, OpOverload):
        return hasattr(target, "namespace")  # higher-order operators work, Python functions do not
    if target.namespace == "torchloom":
        return target is chunked_loss
    return not is_view_op(target)


def _has_tensors(node: fx.Node) -> bool:
    return any(True for _ in tensors_in(value_of(node))) or bool(_inputs(node))


def node_flops(node: fx.Node) -> int:
    """Return the floating-point operations of products, convolutions and attention; else 0.

    Causal attention counts half, as fused kernels skip what is masked.
    """
    target, given, named = _call_of(node)
    if not isinstance(target, OpOverload) or value_of(node) is None:
        return 0
    args = fx.node.map_aggregate(fx.node.map_arg(given, value_of), _known)
    kwargs: Any = fx.node.map_aggregate(fx.node.map_arg(named, value_of), _known)
    if target in _FORMULAS:
        flops = _FORMULAS[target](args)
    elif target.overloadpacket in flop_registry:
        out = fx.node.map_aggregate(value_of(node), _known)
        try:
            flops = flop_registry[target.overloadpacket](*args, **kwargs, out_val=out)
        except (
            AssertionError
        ):  # shapes that torch's formula does not know: no run ends of an estimate
            return 0
    else:
        return 0
    return flops // 2 if _is_causal(target, args, kwargs) else flops


def node_traffic_bytes(node: fx.Node) -> int:
    """Return the bytes that a node reads and writes, each tensor once; 0 for a view."""
    if not is_computed(node):
        return 0
    inputs = sum(bytes_of(value) for value in _inputs(node))
    outputs = sum(bytes_of(value) for value in tensors_in(value_of(node)))
    if node.target in _PICKS:
        table = bytes_of(value_of(node.all_input_nodes[0]))
        return inputs - table + 2 * outputs
    target = node.target
    if not isinstance(target, OpOverload):
        return inputs + outputs
    written = [
        value
        for arg, value in _arguments(node, target)
        if arg.alias_info is not None and arg.alias_info.is_write
    ]
    if not written:
        return inputs + outputs
    # What is written in place may be returned as well: it moves once.
    fresh = sum(
        bytes_of(value)
        for ret, value in zip(target._schema.returns, _as_returns(node), strict=False)
        if ret.alias_info is None
    )
    return inputs + fresh + sum(bytes_of(tensor) for item in written for tensor in tensors_in(item))


def _arguments(node: fx.Node, target: OpOverload) -> Iterable[tuple[Any, Any]]:
    for index, arg in enumerate(target._schema.arguments):
        given = argument(node, index, arg.name)
        yield arg, fx.node.map_arg(given, value_of) if given is not None else None


def _as_returns(node: fx.Node) -> list[Any]:
    value = value_of(node)
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _cpu_attention(args: Any) -> int:
    query, key, value = (tensor.shape for tensor in args[:3])
    return sdpa_flop_count(query, *_for_each_head(query, key, value))


def _cpu_attention_backward(args: Any) -> int:
    grad, query, key, value = (tensor.shape for tensor in args[:4])
    return sdpa_backward_flop_count(grad, query, *_for_each_head(query, key, value))


def _for_each_head(query: torch.Size, *shared: torch.Size) -> list[tuple[int, ...]]:
    """Return the shapes of keys and values that heads share as if each had its own: that is what is computed.

    torch 2.11 counts no others.
    """
    return [(*query[:2], *shape[2:]) for shape in shared]


def _chunked_loss(args: Any) -> int:
    rows, weight, *_, wanted = args
    return 2 * rows.numel() * weight.shape[0] * (1 + sum(wanted[:2]))


def _grouped_product(args: Any) -> int:
    """Return the FLOPs of one product for each expert; one matrix, or the inner dim, holds the rows of all in turn."""
    left, right = (tensor.shape for tensor in args[:2])
    num_products = left[0] if len(left) == len(right) == 3 else 1
    return 2 * num_products * left[-2] * left[-1] * right[-1]


def _eigh(args: Any) -> int:
    """Return the FLOPs of eigenvalues and vectors: about 9 n^3 (Golub and Van Loan, "Matrix Computations", 2013, 8.3)."""
    *batch, size, _ = args[0].shape
    return 9 * math.prod(batch) * size**3


def _qr(args: Any) -> int:
    """Return the FLOPs of Householder's triangle and thin basis: 2 n^2 (m - n / 3) each (likewise, 5.2)."""
    *batch, rows, columns = args[0].shape
    small = min(rows, columns)
    return math.prod(batch) * 4 * small**2 * (3 * max(rows, columns) - small) // 3


_FORMULAS = {
    aten._linalg_eigh.default: _eigh,
    aten.linalg_qr.default: _qr,
    aten._grouped_mm.default: _grouped_product,  # torch's own counter knows none
    chunked_loss: _chunked_loss,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cpu_attention_backward,
}


def _is_causal(target: OpOverload, args: Any, kwargs: dict[str, Any]) -> bool:
    for index, arg in enumerate(target._schema.arguments):
        if arg.name == "is_causal":
            return bool(args[index] if index < len(args) else kwargs.get("is_causal", False))
    return False


def _dtype_of(node: fx.Node) -> str:
    """Return the dtype that a product is computed in: that of its first floating input."""
    for tensor in [*_inputs(node), *tensors_in(value_of(node))]:
        if tensor.dtype.is_floating_point:
            return str(tensor.dtype).removeprefix("torch.")
    return "float32"


def _inputs(node: fx.Node) -> list[torch.Tensor]:
    return [tensor for used in node.all_input_nodes for tensor in tensors_in(value_of(used))]


def bytes_of(value: Any) -> int:
    """Return the bytes behind a tensor; dimensions that are only expanded hold one element."""
    if not isinstance(value, torch.Tensor):
        return 0
    numel = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        numel *= size_hint(size) if size_hint(stride) or size_hint(size) == 0 else 1
    return numel * value.element_size()


def _known(value: Any) -> Any:
    """Return a value with the sizes that the trace saw in place of symbols."""
    if isinstance(value, torch.Tensor):
        if all(isinstance(size, int) for size in value.shape):
            return value
        return torch.empty([size_hint(size) for size in value.shape], device="meta")
    return size_hint(value) if isinstance(value, torch.SymInt) else value
