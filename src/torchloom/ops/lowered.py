"""Operators that place communication in the forward and backward graphs.

    gather_start(shards)  -> flat full weights, not yet arrived
    reduce_start(grads)   -> flat shards of mean gradients, not yet arrived
    sync_start(grads)     -> whole mean gradients, not yet arrived
    wait_(results, inputs)   the results have arrived
    resident(shard)       -> the flat full weight that stays gathered between micro-steps

`wait_` is declared to write `results`: a compiler that respects mutation can then neither read a
result too early nor drop the wait. It takes the `inputs` of the start as well, so that their
memory stays untouched while it is on the wire. `params` are the names of the parameters: what ranks do
together is compared by them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchloom.ops.library import define


def _fake_gather_start(
    shards: Sequence[Tensor],
    params: Sequence[str],
    dtype: torch.dtype,
    world_size: int,
    handle: str,
) -> list[Tensor]:
    return [s.new_empty((s.numel() * world_size,), dtype=dtype) for s in shards]


def _fake_reduce_start(
    grads: Sequence[Tensor],
    params: Sequence[str],
    shard_numels: Sequence[int],
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    handle: str,
) -> list[Tensor]:
    return [g.new_empty((n,), dtype=dtype) for g, n in zip(grads, shard_numels, strict=True)]


def _fake_sync_start(
    grads: Sequence[Tensor],
    params: Sequence[str],
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    own_slice: bool,
    handle: str,
) -> list[Tensor]:
    return [torch.empty_like(g, dtype=dtype, memory_format=torch.contiguous_format) for g in grads]


def _fake_wait(results: Sequence[Tensor], inputs: Sequence[Tensor], handle: str) -> None:
    return None


def _fake_broadcast(whole: Tensor, source: int, handle: str, param: str) -> None:
    return None


def _fake_resident(
    shard: Tensor, dtype: torch.dtype, world_size: int, handle: str, param: str
) -> Tensor:
    return shard.new_empty((shard.numel() * world_size,), dtype=dtype)


gather_start = define(
    "gather_start(Tensor[] shards, str[] params, ScalarType dtype, int world_size, str handle) "
    "-> Tensor[]",
    _fake_gather_start,
)
"""Begin to all-gather flat shards; each result is flat with `world_size` times as many elements."""

reduce_start = define(
    "reduce_start(Tensor[] grads, str[] params, int[] shard_numels, ScalarType dtype, "
    "ScalarType wire_dtype, str handle) -> Tensor[]",
    _fake_reduce_start,
)
"""Begin to average full gradients, keeping this rank's flat shard of each."""

sync_start = define(
    "sync_start(Tensor[] grads, str[] params, ScalarType dtype, ScalarType wire_dtype, "
    "bool own_slice, str handle) -> Tensor[]",
    _fake_sync_start,
)
"""Begin to average whole gradients over the ranks."""

wait_ = define("wait_(Tensor(a!)[] results, Tensor[] inputs, str handle) -> ()", _fake_wait)
"""Block until the results of a start have arrived; `inputs` may be freed afterwards."""

broadcast_ = define(
    "broadcast_(Tensor(a!) whole, int source, str handle, str param) -> ()", _fake_broadcast
)
"""Replace a whole weight by that of one rank, on all ranks."""

resident = define(
    "resident(Tensor(a) shard, ScalarType dtype, int world_size, str handle, str param) "
    "-> Tensor(a)",
    _fake_resident,
)
"""Return a full flat weight that outlives the graph; it is gathered when the shard has changed.

Declared as a view of `shard`: the memory belongs to neither graph nor compiler, which must not use
it again for another value, and may not write to it."""
