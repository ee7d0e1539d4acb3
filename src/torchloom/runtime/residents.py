"""Weights that stay gathered from one micro-step to the next.

    first use after an update   gather, together with the next ones that are out of date
    every other use             a view of the buffer that is here already

A weight is out of date when its shard has been written since (torch counts writes to a tensor), when
the shard lies in other memory, or when somebody said so: fused optimizers and writes through `.data`
are not counted (torch 2.11-2.13). All ranks write their shards at the same points of the program, so
all ranks gather at the same points.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchloom.ops.replays import never
from torchloom.runtime.host import loaded

GatherInto = Callable[[list[Tensor], list[Tensor], list[str]], None]


@dataclass(eq=False)
class _Kept:
    """One gathered weight."""

    param: str
    full: Tensor
    storage: StorageWeakRef
    """Of the shard; compared, so that a new model at an old address is told apart."""
    shard: weakref.ref[Tensor]
    version: int | None = None
    """Writes that the shard had seen when it was gathered; None: out of date."""


class Residents:
    """The resident weights of one communicator.

    Args:
        gather_into: fills full tensors from shards and waits.
        world_size: ranks that share one copy of the weights.
    """

    def __init__(self, gather_into: GatherInto, world_size: int) -> None:
        self._gather_into, self._world_size = gather_into, world_size
        self._kept: dict[tuple[str, torch.dtype, int], _Kept] = {}
        self.bucket_bytes = 16 << 20
        """Weights are gathered together until they reach this size."""

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that gathered weights hold between steps."""
        return sum(each.full.numel() * each.full.element_size() for each in self._kept.values())

    def get(self, shard: Tensor, dtype: torch.dtype, param: str) -> Tensor:
        """Return a view of the gathered weight, flat and padded; gather it if it is out of date.

        Args:
            shard: this rank's.
            dtype: in which the weight is read.
            param: its name.
        """
        never(f"the weight {param!r} stays gathered from one micro-step to the next")
        storage = StorageWeakRef(shard.untyped_storage())
        key = (param, dtype, storage.cdata)
        kept = self._kept.get(key)
        if kept is None:
            self._drop_dead()
            full = shard.new_empty(shard.numel() * self._world_size, dtype=dtype)
            kept = self._kept[key] = _Kept(param, full, storage, weakref.ref(shard))
        kept.shard = weakref.ref(shard)
        if kept.version is None or kept.version != _writes(shard):
            self._refresh(kept)
        return kept.full.view(-1)

    def invalidate(self, param: str | None = None) -> None:
        """Gather a weight anew at its next use; None means all of them."""
        for kept in self._kept.values():
            if param is None or kept.param == param:
                kept.version = None

    def clear(self) -> None:
        """Free all gathered weights; they are gathered again at their next use."""
        self._kept.clear()

    def _refresh(self, first: _Kept) -> None:
        """Gather a weight, and those after it that are out of date, up to the bucket size."""
        order = list(self._kept.values())
        stale: list[tuple[_Kept, Tensor]] = []
        for kept in order[order.index(first) :]:
            shard = kept.shard()
            if shard is None or kept.full.dtype != first.full.dtype:
                continue
            if kept.version is None or kept.version != _writes(shard):
                stale.append((kept, shard))
        size = first_bucket([kept.full.nbytes for kept, _ in stale], self.bucket_bytes)
        bucket, shards = zip(*stale[:size], strict=True)
        here = [loaded(shard.detach()) for shard in shards]
        sources = [shard.to(first.full.dtype).contiguous() for shard in here]
        names = [kept.param for kept in bucket]
        self._gather_into(sources, [kept.full for kept in bucket], names)
        for kept, shard in zip(bucket, shards, strict=True):
            kept.version = _writes(shard)

    def _drop_dead(self) -> None:
        """Let go of weights whose shards are gone, e.g. with their model."""
        self._kept = {key: each for key, each in self._kept.items() if not each.storage.expired()}


def first_bucket(sizes: Sequence[int], bucket_bytes: int) -> int:
    """Return how many weights of so many bytes are gathered together: at least one, in order."""
    held = 0
    for index, size in enumerate(sizes):
        held += size
        if index and held > bucket_bytes:
            return index
    return len(sizes)


def _writes(shard: Tensor) -> int:
    """Return how often a tensor has been written in place, as far as torch counts."""
    return -1 if shard.is_inference() else shard._version
