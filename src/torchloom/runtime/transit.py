"""Memory of collectives that no graph shows: what they hold from their start to their wait.

    cast       tensors in the dtype of the wire
    packed     small tensors that travel together, on both ends
    inbox      what peers send, until it is summed

The figures are those of the code in this folder, transport by transport, and tests hold them
against the allocator. Where ranks differ (the last one owns padding) the largest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchloom import ops
from torchloom._torch.tensors import size_hint
from torchloom.runtime.communicators import lookup
from torchloom.runtime.residents import first_bucket
from torchloom.shard.shards import shard_numel_of


def transit_bytes(target: Any, args: Sequence[Any]) -> int:
    """Return what a collective holds between its start and its wait, besides its results.

    Args:
        target: an operator; 0 for those that start no collective.
        args: its arguments, fake tensors among them.
    """
    if target is ops.gather_start:
        shards, _, dtype, _, handle = args[:5]
        comm = lookup(handle)
        numels = [_numel(shard) for shard in shards]
        cast = _bytes([n for n, s in zip(numels, shards, strict=True) if s.dtype != dtype], dtype)
        return cast + comm.shard.gather_transit(numels, dtype)
    if target is ops.reduce_start:
        grads, _, numels, dtype, wire, handle = args[:6]
        comm = lookup(handle)
        full = [_numel(grad) for grad in grads]
        return _cast(grads, wire) + comm.shard.reduce_transit(list(numels), dtype, wire, full)
    if target is ops.sync_start:
        grads, _, dtype, wire, own_slice, handle = args[:6]
        comm = lookup(handle)
        full = [_numel(grad) for grad in grads]
        if not own_slice:
            copies = 0 if dtype == wire else _bytes(full, wire)
            return copies + comm.shard.all_reduce_transit(full, wire)
        shards = [shard_numel_of(numel, comm.world_size) for numel in full]
        held = _cast(grads, wire) + _bytes(shards, dtype)
        return held + comm.shard.reduce_transit(shards, dtype, wire, full)
    return 0


def refresh_bytes(uses: Sequence[tuple[Tensor, torch.dtype, str, bool]]) -> list[int]:
    """Return what gathering weights anew that stay gathered holds besides them, at each first use.

    Args:
        uses: in order; for each the shard, the dtype of the whole, the communicator's handle, and
            whether the shard waits on the host. A use gathers a bucket: what follows is part of it.
    """
    found, left = [0] * len(uses), list(range(len(uses)))
    while left:
        _, dtype, handle, _ = uses[left[0]]
        comm = lookup(handle)
        together = [index for index in left if uses[index][1:3] == (dtype, handle)]
        sizes = [_numel(uses[index][0]) * comm.world_size * dtype.itemsize for index in together]
        bucket = together[: first_bucket(sizes, comm.residents.bucket_bytes)]
        shards = [uses[index][0] for index in bucket]
        on_host = [uses[index][0] for index in bucket if uses[index][3]]
        found[left[0]] = (
            sum(_numel(shard) * shard.element_size() for shard in on_host)
            + _cast(shards, dtype)
            + comm.shard.gather_transit([_numel(shard) for shard in shards], dtype)
        )
        left = [index for index in left if index not in bucket]
    return found


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
    return _bytes([_numel(each) for each in tensors if each.dtype != dtype], dtype)


def _bytes(numels: Sequence[int], dtype: torch.dtype) -> int:
    return sum(numels) * dtype.itemsize


def _numel(tensor: Tensor) -> int:
    return size_hint(tensor.numel())
