"""Collectives over any backend of torch.distributed that has native tensor collectives (NCCL).

Gathers write straight into the results. Reductions stage padded inputs in one flat bucket, whose
padding is zeroed so that no rank receives its neighbour's bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchloom.runtime.base import GroupRef, Pending
from torchloom.runtime.channel import Channel, Label
from torchloom.runtime.packing import pack, unpack


@dataclass(frozen=True)
class C10dCollectives:
    """The group's own all-gather, reduce-scatter and all-reduce."""

    group: GroupRef
    channel: Channel
    overlaps_compute: bool = True

    def all_gather(self, shards: Sequence[Tensor], fulls: Sequence[Tensor], what: Label) -> Pending:
        """Begin an all-gather; see `Collectives.all_gather`."""
        self.channel.begin(what)
        with _quiet():
            works = [
                dist.all_gather_into_tensor(full, shard, group=self.group(), async_op=True)
                for shard, full in zip(shards, fulls, strict=True)
                if shard.numel()
            ]
        keep = list(shards)

        def finish() -> None:
            _wait_all(works)
            keep.clear()

        return Pending(finish)

    def reduce_scatter(
        self, fulls: Sequence[Tensor], shards: Sequence[Tensor], scale: float, what: Label
    ) -> Pending:
        """Begin a reduce-scatter; see `Collectives.reduce_scatter`."""
        self.channel.begin(what)
        size = self.group.size
        total = sum(shard.numel() for shard in shards)
        bucket = fulls[0].new_zeros(size, total)
        offset = 0
        for full, shard in zip(fulls, shards, strict=True):
            _scatter_rows(full, bucket[:, offset : offset + shard.numel()])
            offset += shard.numel()
        flat = bucket.new_empty(total)
        with _quiet():
            work = dist.reduce_scatter_tensor(
                flat, bucket.view(-1), group=self.group(), async_op=True
            )
        keep = [bucket]

        def finish() -> None:
            _wait_all([work])
            unpack(flat.to(shards[0].dtype).mul_(scale), shards)
            keep.clear()

        return Pending(finish)

    def all_reduce(self, tensors: Sequence[Tensor], scale: float, what: Label) -> Pending:
        """Begin an all-reduce; see `Collectives.all_reduce`."""
        self.channel.begin(what)
        flat = pack(tensors)
        work = dist.all_reduce(flat, group=self.group(), async_op=True)

        def finish() -> None:
            _wait_all([work])
            unpack(flat.mul_(scale), tensors)

        return Pending(finish)

    def meet(self, what: Label) -> None:
        """Note that this rank has come here; see `Collectives.meet`."""
        self.channel.begin(what)

    def gather_transit(self, numels: Sequence[int], dtype: torch.dtype) -> int:
        """Nothing: results are written in place."""
        return 0

    def reduce_transit(
        self, numels: Sequence[int], dtype: torch.dtype, wire_dtype: torch.dtype
    ) -> int:
        """A bucket of the rows of all ranks, and this rank's sum."""
        return (self.group.size + 1) * sum(numels) * wire_dtype.itemsize

    def all_reduce_transit(self, numels: Sequence[int], dtype: torch.dtype) -> int:
        """All tensors, packed."""
        return sum(numels) * dtype.itemsize


def _scatter_rows(full: Tensor, rows: Tensor) -> None:
    """Copy `full` row by row into a (world size, n) view, leaving the padding as it is."""
    flat, numel = full.reshape(-1), rows.shape[1]
    for rank, row in enumerate(rows):
        part = flat[rank * numel : (rank + 1) * numel]
        row[: part.numel()].copy_(part)


def _wait_all(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


@contextmanager
def _quiet() -> Any:
    """Hold back torch 2.13's notice that these calls have new names: 2.11 has only the old ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
