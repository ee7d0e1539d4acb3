"""Operators that a sharded model calls and that the joint graph holds.

    gather     shard  -> full weight       backward: reduce
    reduce     full gradient -> shard of the mean gradient
    replicate  whole parameter -> weight   backward: sync
    sync       local gradient -> mean gradient over all ranks
    cast       whole parameter -> weight   only for Dynamo's graphs: AOTAutograd sees `to`

Each is one node of the joint graph. The gradient formulas are the transposes of each other
(Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 7: an all-gather forward is a
reduce-scatter backward); the mean, not the sum, because data-parallel gradients are averaged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchloom.ops.library import LIBRARY, define


def _dense_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


gather = define(
    "gather(Tensor shard, SymInt[] shape, ScalarType dtype, ScalarType wire_dtype, str handle, "
    "str param) -> Tensor",
    lambda shard, shape, dtype, *_: shard.new_empty(shape, dtype=dtype),
)
"""All-gather the flat, padded `shard` into a weight of `shape` and `dtype` (cast before the wire).

`wire_dtype` is the dtype in which the gradient will travel; `param` is the parameter's name."""

reduce = define(
    "reduce(Tensor grad, SymInt shard_numel, ScalarType dtype, ScalarType wire_dtype, str handle, "
    "str param) -> Tensor",
    lambda grad, shard_numel, dtype, *_: grad.new_empty((shard_numel,), dtype=dtype),
)
"""Average a full gradient over the ranks and keep this rank's flat, zero-padded shard."""

replicate = define(
    "replicate(Tensor whole, ScalarType dtype, ScalarType wire_dtype, str handle, str param) "
    "-> Tensor",
    lambda whole, dtype, *_: _dense_like(whole, dtype),
)
"""Return a copy of a whole parameter in `dtype`; its gradient is averaged over the ranks."""

sync = define(
    "sync(Tensor grad, ScalarType dtype, ScalarType wire_dtype, bool own_slice, str handle, "
    "str param) -> Tensor",
    lambda grad, dtype, *_: _dense_like(grad, dtype),
)
"""Average a whole gradient over the ranks.

With `own_slice` only this rank's slice of the flat gradient is averaged and the rest stays local:
half the traffic, and all that an optimizer sharded by slices reads (ZeRO-1)."""


def _cast(whole: Tensor, dtype: torch.dtype, param: str) -> Tensor:
    return whole.to(dtype)


cast = define(
    "cast(Tensor whole, ScalarType dtype, str param) -> Tensor",
    _cast,
    is_composite=True,
)
"""Return a parameter in another dtype, under its name."""


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, _shape, _dtype, ctx.wire_dtype, ctx.handle, ctx.param = inputs
    ctx.shard_numel, ctx.shard_dtype = shard.numel(), shard.dtype


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    shard_grad = reduce(
        grad, ctx.shard_numel, ctx.shard_dtype, ctx.wire_dtype, ctx.handle, ctx.param
    )
    return shard_grad, None, None, None, None, None


def _keep_replicate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    whole, _dtype, ctx.wire_dtype, ctx.handle, ctx.param = inputs
    ctx.whole_dtype = whole.dtype


def _replicate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    mean = sync(grad, ctx.whole_dtype, ctx.wire_dtype, False, ctx.handle, ctx.param)
    return mean, None, None, None, None


torch.library.register_autograd(
    "torchloom::gather", _gather_backward, setup_context=_keep_gather, lib=LIBRARY
)
torch.library.register_autograd(
    "torchloom::replicate", _replicate_backward, setup_context=_keep_replicate, lib=LIBRARY
)
