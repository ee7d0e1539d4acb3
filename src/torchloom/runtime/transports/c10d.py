"""Collectives over any backend of torch.distributed that has native tensor collectives (NCCL).

Each call is one collective for each dtype among its tensors, so a bucket costs one launch:

    one tensor        the collective on it, in place
    coalesced         several tensors, one launch, no copies: where the group can (NCCL)
    packed            several tensors, copied into one flat buffer and out of another

A reduction sends equal slices. A full tensor that does not divide by the ranks is copied once into
a padded one, whose padding is zero, so that no rank receives its neighbour's bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchloom._torch.coalesced import (
    all_gather_coalesced,
    all_gather_single,
    all_reduce_coalesced,
    reduce_scatter_coalesced,
    reduce_scatter_single,
    supports_coalescing,
)
from torchloom.runtime.base import GroupRef, Pending
from torchloom.runtime.channel import Channel, Label, NamedCollective
from torchloom.runtime.lines import wait_for
from torchloom.runtime.transports.packing import pack, unpack


@dataclass(frozen=True)
class C10dCollectives:
    """The group's own all-gather, reduce-scatter and all-reduce."""

    group: GroupRef
    channel: Channel

    @cached_property
    def coalesces(self) -> bool:
        """Whether several tensors travel by one collective without being packed."""
        return supports_coalescing(self.group())

    def all_gather(self, shards: Sequence[Tensor], fulls: Sequence[Tensor], what: Label) -> Pending:
        """Begin an all-gather; see `Collectives.all_gather`."""
        entry = self.channel.begin(what)
        return _all_of(self._gather(entry, *alike) for alike in _by_dtype(shards, fulls))

    def reduce_scatter(
        self, fulls: Sequence[Tensor], shards: Sequence[Tensor], scale: float, what: Label
    ) -> Pending:
        """Begin a reduce-scatter; see `Collectives.reduce_scatter`."""
        entry = self.channel.begin(what)
        return _all_of(self._reduce(entry, *alike, scale) for alike in _by_dtype(fulls, shards))

    def all_reduce(self, tensors: Sequence[Tensor], scale: float, what: Label) -> Pending:
        """Begin an all-reduce; see `Collectives.all_reduce`."""
        entry = self.channel.begin(what)
        return _all_of(self._sum(entry, alike, scale) for alike, _ in _by_dtype(tensors, tensors))

    def meet(self, what: Label) -> None:
        """Note that this rank has come here; see `Collectives.meet`."""
        self.channel.begin(what)

    def gather_transit(self, numels: Sequence[int], dtype: torch.dtype) -> int:
        """Packed, this rank's shards and those of all; else results are written in place."""
        if self._travel_as_they_are(numels):
            return 0
        return (1 + self.group.size) * sum(numels) * dtype.itemsize

    def reduce_transit(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        full_numels: Sequence[int] | None = None,
    ) -> int:
        """Packed, the rows of all ranks and the sum; else padded copies, and sums to be cast."""
        size, item_bytes = self.group.size, wire_dtype.itemsize
        if not self._travel_as_they_are(numels):
            return (size + 1) * sum(numels) * item_bytes
        if full_numels is None:
            full_numels = [size * numel for numel in numels]
        padded = sum(
            size * numel
            for numel, full in zip(numels, full_numels, strict=True)
            if size * numel != full
        )
        return (padded + (0 if dtype == wire_dtype else sum(numels))) * item_bytes

    def all_reduce_transit(self, numels: Sequence[int], dtype: torch.dtype) -> int:
        """All tensors, where they are packed."""
        return 0 if self._travel_as_they_are(numels) else sum(numels) * dtype.itemsize

    def _travel_as_they_are(self, numels: Iterable[int]) -> bool:
        return self.coalesces or sum(numel > 0 for numel in numels) <= 1

    def _gather(
        self, entry: NamedCollective, shards: Sequence[Tensor], fulls: Sequence[Tensor]
    ) -> Callable[[], None]:
        group, size = self.group(), self.group.size
        if len(shards) > 1 and not self.coalesces:
            mine = pack(shards)
            rows = mine.new_empty(size, mine.numel())
            work = all_gather_single(rows.view(-1), mine, group=group, async_op=True)
            return self._then(entry, work, [mine], lambda: _unpack_rows(rows, fulls))
        if len(shards) > 1:
            work = all_gather_coalesced(group, fulls, shards)
        else:
            work = all_gather_single(fulls[0], shards[0], group=group, async_op=True)
        return self._then(entry, work, [*shards])

    def _reduce(
        self,
        entry: NamedCollective,
        fulls: Sequence[Tensor],
        shards: Sequence[Tensor],
        scale: float,
    ) -> Callable[[], None]:
        group, size = self.group(), self.group.size
        if len(fulls) > 1 and not self.coalesces:
            rows = _pack_rows(fulls, shards, size)
            flat = rows.new_empty(rows.shape[1])
            work = reduce_scatter_single(flat, rows.view(-1), group=group, async_op=True)
            sums = [*flat.split([shard.numel() for shard in shards])]
            return self._then(entry, work, [rows], lambda: _scale_into(shards, sums, scale))
        sources = [_padded(full, size * s.numel()) for full, s in zip(fulls, shards, strict=True)]
        # What is summed in another dtype is cast at the end.
        sums = [
            shard if shard.dtype == full.dtype else full.new_empty(shard.shape)
            for full, shard in zip(fulls, shards, strict=True)
        ]
        if len(fulls) > 1:
            work = reduce_scatter_coalesced(group, sums, sources)
        else:
            work = reduce_scatter_single(sums[0], sources[0], group=group, async_op=True)
        return self._then(entry, work, sources, lambda: _scale_into(shards, sums, scale))

    def _sum(
        self, entry: NamedCollective, tensors: Sequence[Tensor], scale: float
    ) -> Callable[[], None]:
        group = self.group()
        if len(tensors) > 1 and not self.coalesces:
            flat = pack(tensors)
            work = dist.all_reduce(flat, group=group, async_op=True)
            return self._then(entry, work, [], lambda: unpack(flat.mul_(scale), tensors))
        if len(tensors) > 1:
            work = all_reduce_coalesced(group, tensors)
        else:
            work = dist.all_reduce(tensors[0], group=group, async_op=True)
        return self._then(entry, work, [], lambda: _scale_into(tensors, tensors, scale))

    def _then(
        self,
        entry: NamedCollective,
        work: Any,
        held: list[Tensor],
        after: Callable[[], None] | None = None,
    ) -> Callable[[], None]:
        """Return what waits for `work`, frees `held` and goes on with `after`.

        On a GPU the wait blocks the current stream, not this thread.
        """

        def finish() -> None:
            wait_for(entry, [work], on_stream=True)
            held.clear()
            if after is not None:
                after()

        return finish


def _by_dtype(
    sent: Sequence[Tensor], received: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Group pairs by the dtype of what is sent, in the order of their first; drop empty ones."""
    found: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for one, other in zip(sent, received, strict=True):
        if one.numel():
            ones, others = found[one.dtype]
            ones.append(one)
            others.append(other)
    yield from found.values()


def _all_of(begun: Iterable[Callable[[], None]]) -> Pending:
    """Return what ends everything that has begun."""
    finishes = [*begun]

    def finish() -> None:
        for each in finishes:
            each()
        finishes.clear()

    return Pending(finish)


def _unpack_rows(rows: Tensor, fulls: Sequence[Tensor]) -> None:
    """Copy the packed shards of all ranks, one row each, into the full tensors."""
    size = len(rows)
    parts = rows.split([full.numel() // size for full in fulls], dim=1)
    for part, full in zip(parts, fulls, strict=True):
        full.view(size, -1).copy_(part)


def _pack_rows(fulls: Sequence[Tensor], shards: Sequence[Tensor], size: int) -> Tensor:
    """Return one row per rank with that rank's slice of each full tensor; padding is zero."""
    numels = [shard.numel() for shard in shards]
    rows = fulls[0].new_zeros(size, sum(numels))
    for full, place in zip(fulls, rows.split(numels, dim=1), strict=True):
        flat, numel = full.view(-1), place.shape[1]
        for rank, row in enumerate(place):
            part = flat[rank * numel : (rank + 1) * numel]
            row[: part.numel()].copy_(part)
    return rows


def _padded(full: Tensor, numel: int) -> Tensor:
    """Return `full` flat; a copy with zeros at its end where it holds less than `numel`."""
    flat = full.view(-1)
    if flat.numel() == numel:
        return flat
    padded = flat.new_zeros(numel)
    padded[: flat.numel()].copy_(flat)
    return padded


def _scale_into(targets: Sequence[Tensor], sums: Sequence[Tensor], scale: float) -> None:
    """Write scaled sums into tensors of the same or another dtype.

    Each is scaled in the wider of its two dtypes. A step is one launch for all tensors.
    """
    pairs = [*zip(targets, sums, strict=True)]
    _scale([one for to, one in pairs if to.element_size() < one.element_size()], scale)
    moved = [(to, one) for to, one in pairs if to is not one]
    if moved:
        torch._foreach_copy_([to for to, _ in moved], [one for _, one in moved])
    _scale([to for to, one in pairs if to.element_size() >= one.element_size()], scale)


def _scale(tensors: list[Tensor], scale: float) -> None:
    if tensors and scale != 1.0:
        torch._foreach_mul_(tensors, scale)
