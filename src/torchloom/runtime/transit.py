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

from torchloom import _torch, ops
from torchloom.runtime.communicator import lookup
from torchloom.shard.pieces import piece_numel


def transit_bytes(target: Any, args: Sequence[Any]) -> int:
    """Return what a collective holds between its start and its wait, besides its results.

    Args:
        target: an operator; 0 for those that start no collective.
        args: its arguments, fake tensors among them.
    """
    if target is ops.gather_start:
        shards, dtype, _, handle = args[:4]
        comm = lookup(handle)
        numels = [_numel(shard) for shard in shards]
        cast = _bytes([n for n, s in zip(numels, shards, strict=True) if s.dtype != dtype], dtype)
        return cast + comm.shard.gather_transit(numels, dtype)
    if target is ops.reduce_start:
        grads, numels, dtype, wire, handle = args[:5]
        comm = lookup(handle)
        return _cast(grads, wire) + comm.shard.reduce_transit(list(numels), dtype, wire)
    if target is ops.sync_start:
        grads, dtype, wire, own_slice, handle = args[:5]
        comm = lookup(handle)
        full = [_numel(grad) for grad in grads]
        if not own_slice:
            copies = 0 if dtype == wire else _bytes(full, wire)
            return copies + comm.shard.all_reduce_transit(full, wire)
        pieces = [piece_numel(numel, comm.world_size) for numel in full]
        held = _cast(grads, wire) + _bytes(pieces, dtype)
        return held + comm.shard.reduce_transit(pieces, dtype, wire)
    return 0


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
    return _bytes([_numel(each) for each in tensors if each.dtype != dtype], dtype)


def _bytes(numels: Sequence[int], dtype: torch.dtype) -> int:
    return sum(numels) * dtype.itemsize


def _numel(tensor: Tensor) -> int:
    return _torch.size_hint(tensor.numel())
