"""Collectives through shared slots: each byte is written once by its owner and read by its users.

* gather = every rank copies its shards into its slot, and the others' out of theirs;
* reduce = every rank copies the slices that others own into its slot, and sums its own slice of all
  slots, in rank order: with the arithmetic of `runtime.transports.gloo`, bit for bit the same result. Where
  the scale is a power of two, slices are scaled on their way, which saves a pass over the sum;
* all-reduce = the same for whole tensors; large ones of more than two ranks as reduce and gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from torchloom.errors import ShardError
from torchloom.runtime.base import GroupRef, Pending
from torchloom.runtime.channel import Label, NamedCollective
from torchloom.runtime.transports.shm.arena import ALIGNMENT
from torchloom.runtime.transports.shm.link import Link
from torchloom.runtime.transports.shm.ring import Ring, Work
from torchloom.runtime.transports.shm.slots import SlotPart, plan_parts, row, typed
from torchloom.runtime.transports.summing import scales_early, sum_dtype, sum_into, sum_scaled_into

_BLOCK = 64 << 10
"""Elements that are summed at a time, so that a second pass over them finds them in the cache."""
_TWO_PHASES_BYTES = 256 << 10
"""From here, an all-reduce of more than two ranks is cheaper as reduce and gather."""


class SharedMemoryCollectives:
    """Gathers and reductions of the ranks of one host."""

    def __init__(self, group: GroupRef, link: Link, slots: Sequence[Sequence[Tensor]]) -> None:
        self.group = group
        self.link = link
        self.channel = link.channel
        self._ring: Ring | None = Ring(link, slots)
        self._slot_bytes = slots[0][0].numel()

    def close(self) -> None:
        """Let go of the shared memory; the group has ended."""
        self._ring = None
        self.link.close()

    def all_gather(self, shards: Sequence[Tensor], fulls: Sequence[Tensor], what: Label) -> Pending:
        """Begin an all-gather; see `Collectives.all_gather`."""
        return self._all_gather(shards, fulls, self.channel.begin(what))

    def _all_gather(
        self, shards: Sequence[Tensor], fulls: Sequence[Tensor], entry: NamedCollective
    ) -> Pending:
        rank = self.group.rank
        numels = [shard.numel() for shard in shards]

        def view(slot: Tensor, part: SlotPart, numel: int) -> Tensor:
            return typed(slot, part.offset_bytes, numel, shards[part.index].dtype)

        def work(parts: list[SlotPart]) -> Work:
            def fill(slot: Tensor) -> None:
                for part in parts:
                    source = shards[part.index].view(-1)[part.start : part.stop]
                    view(slot, part, source.numel()).copy_(source)

            def drain(slots: Sequence[Tensor]) -> None:
                for part in parts:
                    for peer in self.link.others:
                        place = row(fulls[part.index], peer, numels[part.index])
                        place = place[part.start : part.stop]
                        place.copy_(view(slots[peer], part, place.numel()))

            return Work(fill, drain, entry)

        for shard, full in zip(shards, fulls, strict=True):
            own = row(full, rank, shard.numel())
            if own.data_ptr() != shard.data_ptr():  # a shard may lie in its place already
                own.copy_(shard.view(-1)[: own.numel()])
        item_bytes = [shard.element_size() for shard in shards]
        return self._begin([work(parts) for parts in plan_parts(numels, item_bytes, self._room(1))])

    def reduce_scatter(
        self, fulls: Sequence[Tensor], shards: Sequence[Tensor], scale: float, what: Label
    ) -> Pending:
        """Begin a reduce-scatter; see `Collectives.reduce_scatter`."""
        return self._reduce_scatter(fulls, shards, scale, self.channel.begin(what))

    def _reduce_scatter(
        self,
        fulls: Sequence[Tensor],
        shards: Sequence[Tensor],
        scale: float,
        entry: NamedCollective,
    ) -> Pending:
        size, rank = self.group.size, self.group.rank
        if size == 1:
            return _alone(
                lambda: [
                    sum_into(s, [f.view(-1)], scale) for f, s in zip(fulls, shards, strict=True)
                ]
            )
        room = self._room(size - 1)
        numels = [shard.numel() for shard in shards]
        early = [
            scales_early(full, shard, scale) for full, shard in zip(fulls, shards, strict=True)
        ]

        def piece(part: SlotPart, owner: int) -> Tensor:
            return row(fulls[part.index], owner, numels[part.index])[part.start : part.stop]

        def view(slot: Tensor, part: SlotPart, writer: int, owner: int, numel: int) -> Tensor:
            # A slot holds one lane for each rank but its writer.
            lane = owner - (owner > writer)
            return typed(slot, lane * room + part.offset_bytes, numel, fulls[part.index].dtype)

        def work(parts: list[SlotPart]) -> Work:
            def fill(slot: Tensor) -> None:
                for part in parts:
                    for peer in self.link.others:
                        source = piece(part, peer)
                        place = view(slot, part, rank, peer, source.numel())
                        _send(source, place, scale if early[part.index] else None)

            def drain(slots: Sequence[Tensor]) -> None:
                for part in parts:
                    own = piece(part, rank)
                    addends = [
                        own if peer == rank else view(slots[peer], part, peer, rank, own.numel())
                        for peer in range(size)
                    ]
                    out = shards[part.index][part.start : part.stop]
                    add = partial(sum_into, scale=scale)
                    if early[part.index]:
                        add = partial(sum_scaled_into, own=rank, scale=scale)
                    # A scaled sum of two is one pass, and needs no cache.
                    in_one_pass = size == 2 and early[part.index]
                    _in_blocks(out, addends, add, out.numel() if in_one_pass else _BLOCK)

            return Work(fill, drain, entry)

        item_bytes = [full.element_size() for full in fulls]
        return self._begin([work(parts) for parts in plan_parts(numels, item_bytes, room)])

    def all_reduce(self, tensors: Sequence[Tensor], scale: float, what: Label) -> Pending:
        """Begin an all-reduce; see `Collectives.all_reduce`."""
        size, rank = self.group.size, self.group.rank
        entry = self.channel.begin(what)
        if size == 1:
            return _alone(lambda: [tensor.mul_(scale) for tensor in tensors])
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size > 2 and num_bytes >= _TWO_PHASES_BYTES:
            return self._all_reduce_in_two(tensors, scale, entry)
        flats = [tensor.view(-1) for tensor in tensors]

        def view(slot: Tensor, part: SlotPart) -> Tensor:
            return typed(slot, part.offset_bytes, part.stop - part.start, flats[part.index].dtype)

        def work(parts: list[SlotPart]) -> Work:
            def fill(slot: Tensor) -> None:
                for part in parts:
                    view(slot, part).copy_(flats[part.index][part.start : part.stop])

            def drain(slots: Sequence[Tensor]) -> None:
                for part in parts:
                    own = flats[part.index][part.start : part.stop]
                    addends = [
                        own if peer == rank else view(slots[peer], part) for peer in range(size)
                    ]
                    total = torch.empty_like(own, dtype=sum_dtype(own.dtype))
                    _in_blocks(total, addends, partial(sum_into, scale=1.0), _BLOCK)
                    own.copy_(total).mul_(scale)

            return Work(fill, drain, entry)

        numels = [flat.numel() for flat in flats]
        item_bytes = [flat.element_size() for flat in flats]
        return self._begin([work(parts) for parts in plan_parts(numels, item_bytes, self._room(1))])

    def _all_reduce_in_two(
        self, tensors: Sequence[Tensor], scale: float, entry: NamedCollective
    ) -> Pending:
        size = self.group.size
        flats = [tensor.view(-1) for tensor in tensors if tensor.numel()]
        totals = [
            flat.new_empty(-(-flat.numel() // size), dtype=sum_dtype(flat.dtype)) for flat in flats
        ]
        reduced = self._reduce_scatter(flats, totals, 1.0, entry)

        def finish() -> None:
            reduced.finish()
            own = [
                total.to(flat.dtype).mul_(scale) for flat, total in zip(flats, totals, strict=True)
            ]
            self._all_gather(own, flats, entry).finish()

        return Pending(finish)

    def meet(self, what: Label) -> None:
        """Return when all ranks of the group have come here; see `Collectives.meet`."""
        self._alive()
        self.link.barrier(what)

    def gather_transit(self, numels: Sequence[int], dtype: torch.dtype) -> int:
        """Nothing of a rank's own: tensors pass through the shared slots."""
        return 0

    def reduce_transit(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        full_numels: Sequence[int] | None = None,
    ) -> int:
        """Nothing: sums are taken from the shared slots."""
        return 0

    def all_reduce_transit(self, numels: Sequence[int], dtype: torch.dtype) -> int:
        """In two phases, this rank's sums; else no more than a part of a slot."""
        size = self.group.size
        if size <= 2 or sum(numels) * dtype.itemsize < _TWO_PHASES_BYTES:
            return 0
        return sum(-(-numel // size) for numel in numels) * sum_dtype(dtype).itemsize

    def _begin(self, work: list[Work]) -> Pending:
        ring = self._alive()
        ticket = ring.begin(work)
        return Pending(lambda: self._alive().finish(ticket))

    def _alive(self) -> Ring:
        self.group()  # says so, if it has been destroyed
        if self._ring is None:
            raise ShardError("the shared memory of a destroyed process group was used")
        return self._ring

    def _room(self, num_lanes: int) -> int:
        """Bytes of one of so many equal parts of a slot."""
        return self._slot_bytes // num_lanes // ALIGNMENT * ALIGNMENT


def _alone(run: Callable[[], object]) -> Pending:
    """A group of one rank moves nothing."""

    def finish() -> None:
        run()

    return Pending(finish)


def _send(source: Tensor, place: Tensor, scale: float | None) -> None:
    if scale is None:
        place.copy_(source)
    else:
        torch.mul(source, scale, out=place)


def _in_blocks(
    out: Tensor, parts: Sequence[Tensor], add: Callable[..., None], block_numel: int
) -> None:
    for start in range(0, out.numel(), max(1, block_numel)):
        stop = start + block_numel
        add(out[start:stop], [part[start:stop] for part in parts])
