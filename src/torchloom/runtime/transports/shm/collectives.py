"""Collectives through shared slots: each byte is written once by its owner and read by its users.

* gather = every rank copies its shards into its slot, and the others' out of theirs;
* reduce = every rank copies the slices that others own into its slot, and sums its own slice of all
  slots, in rank order: with the arithmetic of `runtime.transports.gloo`, bit for bit the same result;
* all-reduce = both (`runtime.transports.summing`);
* all-to-all = every rank copies what it sends each other into its slot, and what it is sent out of theirs.

What is to be done passes through a few slots per rank, in the same order on every rank:

    begin   wait until all have read what was in my slot, fill it, say so
    drain   wait until all have filled theirs, read them, say so

A rank that begins more than there are slots first completes what it began longest ago, so a rank that is late for
a moment holds nobody up as long as the slots last. All ranks begin and finish in one order, so some rank can always
go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchloom.errors import ShardError
from torchloom.runtime.base import GroupRef, Pending
from torchloom.runtime.channel import Label, NamedCollective
from torchloom.runtime.transports.shm.arena import ALIGNMENT
from torchloom.runtime.transports.shm.link import Link, Signal, mark_of
from torchloom.runtime.transports.summing import SumsInRankOrder, sum_into


class Work(NamedTuple):
    """One slotful."""

    fill: Callable[[Tensor], None]
    """Writes this rank's contribution into its slot."""
    drain: Callable[[Sequence[Tensor]], None]
    """Reads the slots of all ranks, this one's included."""
    entry: NamedCollective
    """What this is a part of."""


class Ring:
    """The slots of all ranks, and what is on its way through them."""

    def __init__(self, link: Link, slots: Sequence[Sequence[Tensor]]) -> None:
        """Take slots that are free.

        Args:
            link: signals between the ranks.
            slots: by rank, its slots: flat tensors of bytes, as many and as large on all ranks.
        """
        self._link, self._slots, self._num_slots = link, slots, len(slots[0])
        self._issued: deque[Work] = deque()
        self._num_issued = self._num_drained = 0

    def begin(self, work: Sequence[Work]) -> int:
        """Fill a slot for each work; returns a ticket for `finish`."""
        for each in work:
            if len(self._issued) == self._num_slots:
                self._drain()
            self._issue(each)
        return self._num_issued

    def finish(self, ticket: int) -> None:
        """Complete all work up to a ticket of `begin`."""
        while self._num_drained < ticket:
            self._drain()

    def _issue(self, work: Work) -> None:
        for peer in self._link.others:
            self._link.await_(Signal.FREE, peer, work.entry)
        turn = self._num_issued % self._num_slots
        work.fill(self._slots[self._link.rank][turn])
        self._link.mark(turn, mark_of(work.entry, self._num_issued))
        self._num_issued += 1
        self._issued.append(work)
        for peer in self._link.others:
            self._link.send(Signal.FULL, peer)

    def _drain(self) -> None:
        work, turn = self._issued[0], self._num_drained % self._num_slots
        for peer in self._link.others:
            self._link.await_(Signal.FULL, peer, work.entry)
            self._link.check(turn, mark_of(work.entry, self._num_drained), peer, work.entry)
        work.drain([slots[turn] for slots in self._slots])
        self._issued.popleft()
        self._num_drained += 1
        for peer in self._link.others:
            self._link.send(Signal.FREE, peer)


class SharedMemoryCollectives(SumsInRankOrder):
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

    def gather_as(
        self, shards: Sequence[Tensor], fulls: Sequence[Tensor], entry: NamedCollective
    ) -> Pending:
        """Begin an all-gather that is part of a collective."""

        def work(parts: list[SlotPart]) -> Work:
            def fill(slot: Tensor) -> None:
                for part in parts:
                    part.of(slot, shards[part.index].dtype).copy_(
                        shards[part.index].view(-1)[part.start : part.stop]
                    )

            def drain(slots: Sequence[Tensor]) -> None:
                for part in parts:
                    shard = shards[part.index]
                    for peer in self.link.others:
                        place = fulls[part.index].view(self.group.size, -1)[peer]
                        place[part.start : part.stop].copy_(part.of(slots[peer], shard.dtype))

            return Work(fill, drain, entry)

        for shard, full in zip(shards, fulls, strict=True):
            own = full.view(self.group.size, -1)[self.group.rank]
            if own.data_ptr() != shard.data_ptr():  # a shard may lie in its place already
                own.copy_(shard.view(-1))
        sizes = [(shard.numel(), shard.element_size()) for shard in shards]
        return self._begin([work(parts) for parts in plan_parts(sizes, self._slot_bytes)])

    def reduce_as(
        self,
        fulls: Sequence[Tensor],
        shards: Sequence[Tensor],
        scale: float,
        entry: NamedCollective,
    ) -> Pending:
        """Begin a reduce-scatter that is part of a collective."""
        rank, room = self.group.rank, self._lane_bytes

        def slice_of(part: SlotPart, owner: int) -> Tensor:
            flat, start = fulls[part.index].view(-1), owner * shards[part.index].numel()
            return flat[start : start + shards[part.index].numel()][part.start : part.stop]

        def lane(slot: Tensor, part: SlotPart, writer: int, owner: int) -> Tensor:
            dtype, numel = fulls[part.index].dtype, slice_of(part, owner).numel()
            return part.of(self._lane(slot, writer, owner), dtype)[:numel]

        def work(parts: list[SlotPart]) -> Work:
            def fill(slot: Tensor) -> None:
                for part in parts:
                    for peer in self.link.others:
                        lane(slot, part, rank, peer).copy_(slice_of(part, peer))

            def drain(slots: Sequence[Tensor]) -> None:
                for part in parts:
                    addends = [
                        slice_of(part, rank) if peer == rank else lane(slot, part, peer, rank)
                        for peer, slot in enumerate(slots)
                    ]
                    sum_into(shards[part.index][part.start : part.stop], addends, scale)

            return Work(fill, drain, entry)

        sizes = [(s.numel(), f.element_size()) for s, f in zip(shards, fulls, strict=True)]
        return self._begin([work(parts) for parts in plan_parts(sizes, room)])

    def all_to_all(
        self, sent: Tensor, received: Tensor, numels: Sequence[Sequence[int]], what: Label
    ) -> Pending:
        """Begin an all-to-all; see `Collectives.all_to_all`."""
        entry, rank, dtype = self.channel.begin(what), self.group.rank, sent.dtype
        parts = sent.split(list(numels[rank]))
        places = received.split([row[rank] for row in numels])
        places[rank].copy_(parts[rank])
        most = max(count for i, row in enumerate(numels) for j, count in enumerate(row) if i != j)

        def work(one: SlotPart) -> Work:
            def fill(slot: Tensor) -> None:
                for peer in self.link.others:
                    piece = parts[peer][one.start : one.stop]
                    one.of(self._lane(slot, rank, peer), dtype)[: piece.numel()].copy_(piece)

            def drain(slots: Sequence[Tensor]) -> None:
                for peer in self.link.others:
                    place = places[peer][one.start : one.stop]
                    lane = self._lane(slots[peer], peer, rank)
                    place.copy_(one.of(lane, dtype)[: place.numel()])

            return Work(fill, drain, entry)

        slotfuls = plan_parts([(most, sent.element_size())], self._lane_bytes)
        return self._begin([work(one) for [one] in slotfuls])

    def meet(self, what: Label) -> None:
        """Return when all ranks of the group have come here; see `Collectives.meet`."""
        self._open_ring()
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

    @property
    def _lane_bytes(self) -> int:
        """Room of one lane: a slot holds one for each rank but its writer."""
        return self._slot_bytes // (self.group.size - 1) // ALIGNMENT * ALIGNMENT

    def _lane(self, slot: Tensor, writer: int, reader: int) -> Tensor:
        """Return the part of `writer`'s slot that `reader` alone reads."""
        start = self._lane_bytes * (reader - (reader > writer))
        return slot[start : start + self._lane_bytes]

    def _begin(self, work: list[Work]) -> Pending:
        ticket = self._open_ring().begin(work)
        return Pending(lambda: self._open_ring().finish(ticket))

    def _open_ring(self) -> Ring:
        self.group()  # says so, if it has been destroyed
        if self._ring is None:
            raise ShardError("the shared memory of a destroyed process group was used")
        return self._ring


class SlotPart(NamedTuple):
    """Elements `start` to `stop` of one tensor, and where in the slot they go."""

    index: int
    start: int
    stop: int
    offset_bytes: int

    def of(self, slot: Tensor, dtype: torch.dtype) -> Tensor:
        """View the part of a slot of bytes as elements."""
        end = self.offset_bytes + (self.stop - self.start) * dtype.itemsize
        return slot[self.offset_bytes : end].view(dtype)


def plan_parts(sizes: Sequence[tuple[int, int]], capacity_bytes: int) -> list[list[SlotPart]]:
    """Divide flat tensors into slotfuls, in order; equal on all ranks.

    Args:
        sizes: of each tensor, its elements and the bytes of one.
        capacity_bytes: room of one slot; a multiple of `ALIGNMENT`.

    Example:
        >>> [[part[:3] for part in parts] for parts in plan_parts([(3, 4), (40, 4)], 128)]
        [[(0, 0, 3), (1, 0, 16)], [(1, 16, 40)]]
    """
    slotfuls: list[list[SlotPart]] = [[]]
    used = 0
    for index, (numel, size) in enumerate(sizes):
        start = 0
        while start < numel:
            if used >= capacity_bytes:
                slotfuls.append([])
                used = 0
            stop = min(numel, start + (capacity_bytes - used) // size)
            slotfuls[-1].append(SlotPart(index, start, stop, used))
            used += -(-(stop - start) * size // ALIGNMENT) * ALIGNMENT
            start = stop
    return [parts for parts in slotfuls if parts]
