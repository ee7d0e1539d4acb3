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
        super().__init__(group, link.channel)
        self.link = link
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
                    piece = shards[part.index].view(-1)[part.start : part.stop]
                    part.of(slot, piece).copy_(piece)

            def drain(slots: Sequence[Tensor]) -> None:
                for part in parts:
                    rows = fulls[part.index].view(self.group.size, -1)[:, part.start : part.stop]
                    for peer in self.link.others:
                        rows[peer].copy_(part.of(slots[peer], rows[peer]))

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

        def mine(part: SlotPart, owner: int) -> Tensor:
            flat, start = fulls[part.index].view(-1), owner * shards[part.index].numel()
            return flat[start : start + shards[part.index].numel()][part.start : part.stop]

        def take(part: SlotPart, lane: _LaneOf) -> None:
            own = mine(part, self.group.rank)
            ranks = range(self.group.size)
            addends = [own if each == self.group.rank else lane(part, each, own) for each in ranks]
            sum_into(shards[part.index][part.start : part.stop], addends, scale)

        sizes = [(s.numel(), f.element_size()) for s, f in zip(shards, fulls, strict=True)]
        return self._through_lanes(sizes, mine, take, entry)

    def all_to_all(
        self, sent: Tensor, received: Tensor, numels: Sequence[Sequence[int]], what: Label
    ) -> Pending:
        """Begin an all-to-all; see `Collectives.all_to_all`."""
        entry, rank = self.channel.begin(what), self.group.rank
        parts = sent.split(list(numels[rank]))
        places = received.split([row[rank] for row in numels])
        places[rank].copy_(parts[rank])
        most = max(count for i, row in enumerate(numels) for j, count in enumerate(row) if i != j)

        def take(part: SlotPart, lane: _LaneOf) -> None:
            for peer in self.link.others:
                place = places[peer][part.start : part.stop]
                place.copy_(lane(part, peer, place))

        return self._through_lanes(
            [(most, sent.element_size())],
            lambda part, peer: parts[peer][part.start : part.stop],
            take,
            entry,
        )

    def _through_lanes(
        self,
        sizes: Sequence[tuple[int, int]],
        mine: Callable[[SlotPart, int], Tensor],
        take: Callable[[SlotPart, _LaneOf], None],
        entry: NamedCollective,
    ) -> Pending:
        """Begin to pass each other rank parts of tensors that are for it alone.

        Args:
            sizes: of each tensor, the elements that one rank gets at most, and the bytes of one.
            mine: returns what this rank sends a rank, at most a part.
            take: reads a part from the lanes of all other ranks.
            entry: what this is a part of.
        """
        rank = self.group.rank

        def work(parts: list[SlotPart]) -> Work:
            def fill(slot: Tensor) -> None:
                for part in parts:
                    for peer in self.link.others:
                        piece = mine(part, peer)
                        part.of(self._lane(slot, rank, peer), piece).copy_(piece)

            def drain(slots: Sequence[Tensor]) -> None:
                def lane(part: SlotPart, peer: int, to: Tensor) -> Tensor:
                    return part.of(self._lane(slots[peer], peer, rank), to)

                for part in parts:
                    take(part, lane)

            return Work(fill, drain, entry)

        return self._begin([work(parts) for parts in plan_parts(sizes, self._lane_bytes)])

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

    def of(self, slot: Tensor, like: Tensor) -> Tensor:
        """View the part of a slot of bytes as elements, as many as a tensor has."""
        end = self.offset_bytes + like.nbytes
        return slot[self.offset_bytes : end].view(like.dtype)


_LaneOf = Callable[[SlotPart, int, Tensor], Tensor]
"""Returns what a rank has sent of a part, as elements like those of a tensor."""


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
