"""Collectives over gloo, each by the cheapest of gloo's own operations.

Measured between 2 ranks of one host, 12 MB in all (milliseconds): all-gather 11, one broadcast per
rank 5-9, one message per peer 5; 64 MB: reduce-scatter 94, all-reduce 51, one message per peer and a
local sum 31. Hence both gathers and reductions are direct messages:

* gather = each rank sends its shard to every peer, and receives straight into the results: no
  staging copy at all;
* reduce = each rank sends every peer the slice that the peer owns and sums what it receives, in
  rank order, so that the result does not depend on timing; the wire carries each byte once;
* all-reduce = small tensors go whole to every peer, large ones are reduced and gathered.

Receives are posted before sends, so that no message waits for a buffer. Messages carry the key of
their collective as the tag, and gloo delivers a message only to a receive of its tag: ranks that run
different programs wait, which `runtime.lines` ends, and never read what was meant for another tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchloom.runtime.base import GroupRef, Pending
from torchloom.runtime.channel import Channel, Entry, Label
from torchloom.runtime.lines import broken, explained, wait_for
from torchloom.runtime.packing import pack, split_by_size, split_sizes, unpack
from torchloom.runtime.summing import scales_early, sum_dtype, sum_into, sum_scaled_into

_TWO_PHASES_BYTES = 256 << 10
"""From here, an all-reduce is cheaper as reduce and gather: it sums, and holds, a part of the bytes."""


@dataclass(frozen=True)
class GlooCollectives:
    """Gathers and reductions as direct messages between all pairs of ranks."""

    group: GroupRef
    channel: Channel
    overlaps_compute: bool = False

    def all_gather(self, shards: Sequence[Tensor], fulls: Sequence[Tensor], what: Label) -> Pending:
        """Begin an all-gather; see `Collectives.all_gather`."""
        return self._all_gather(shards, fulls, self.channel.begin(what))

    def _all_gather(
        self, shards: Sequence[Tensor], fulls: Sequence[Tensor], entry: Entry
    ) -> Pending:
        split = split_by_size(shards)
        size, rank = self.group.size, self.group.rank
        sources = [shards[i] for i in split.direct]
        places = [fulls[i].view(size, -1) for i in split.direct]
        packed: list[Tensor] = []
        if split.packed:
            mine = pack([shards[i] for i in split.packed])
            rows = mine.new_empty(size, mine.numel())
            sources.append(mine)
            places.append(rows)
            packed = [fulls[i].view(size, -1)[r] for r in range(size) for i in split.packed]
        for source, place in zip(sources, places, strict=True):
            if place[rank].data_ptr() != source.data_ptr():  # a shard may lie in its place already
                place[rank].copy_(source)
        works = self._swap(
            send=lambda peer: sources,
            receive=lambda peer: [place[peer] for place in places],
            entry=entry,
        )

        def finish() -> None:
            wait_for(entry, works)
            if packed:
                unpack(places[-1].view(-1), packed)
            sources.clear()
            places.clear()

        return Pending(finish)

    def reduce_scatter(
        self, fulls: Sequence[Tensor], shards: Sequence[Tensor], scale: float, what: Label
    ) -> Pending:
        """Begin a reduce-scatter; see `Collectives.reduce_scatter`."""
        return self._reduce_scatter(fulls, shards, scale, self.channel.begin(what))

    def _reduce_scatter(
        self, fulls: Sequence[Tensor], shards: Sequence[Tensor], scale: float, entry: Entry
    ) -> Pending:
        split = split_by_size(shards)
        size, rank = self.group.size, self.group.rank
        # One entry per message and peer: the rows that go out, and where their sum ends up.
        rows = [
            [_row(fulls[i], peer, shards[i].numel()) for peer in range(size)] for i in split.direct
        ]
        targets = [shards[i] for i in split.direct]
        if split.packed:
            small = [shards[i] for i in split.packed]
            rows.append(
                [
                    pack([_padded_row(fulls[i], peer, shards[i].numel()) for i in split.packed])
                    for peer in range(size)
                ]
            )
            targets.append(small[0].new_empty(rows[-1][0].numel()))
        # This rank's own row takes its place among those that arrive.
        inboxes = [
            [row[rank] if peer == rank else torch.empty_like(row[rank]) for peer in range(size)]
            for row in rows
        ]
        works = self._swap(
            send=lambda peer: [row[peer] for row in rows],
            receive=lambda peer: [inbox[peer] for inbox in inboxes],
            entry=entry,
        )

        def finish() -> None:
            wait_for(entry, works)
            for inbox, target in zip(inboxes, targets, strict=True):
                _sum(target, inbox, rank, scale)
            if split.packed:
                unpack(targets[-1], small)
            rows.clear()
            inboxes.clear()

        return Pending(finish)

    def all_reduce(self, tensors: Sequence[Tensor], scale: float, what: Label) -> Pending:
        """Begin an all-reduce; see `Collectives.all_reduce`."""
        entry = self.channel.begin(what)
        split = split_by_size(tensors)
        small = [tensors[i] for i in split.packed]
        flats = [tensors[i].view(-1) for i in split.direct] + ([pack(small)] if small else [])
        summed = Pending(lambda: None)
        if flats and self.group.size > 1:
            together = self._sum_whole if _fits_one_message(flats) else self._sum_in_two
            summed = together(flats, entry)

        def finish() -> None:
            summed.finish()
            for flat in flats:
                flat.mul_(scale)
            if small:
                unpack(flats[-1], small)

        return Pending(finish)

    def _sum_whole(self, flats: list[Tensor], entry: Entry) -> Pending:
        """Begin to sum one small tensor: all of it goes to every peer."""
        (flat,), rank = flats, self.group.rank
        inbox = [flat if r == rank else torch.empty_like(flat) for r in range(self.group.size)]
        works = self._swap(
            send=lambda peer: [flat], receive=lambda peer: [inbox[peer]], entry=entry
        )

        def finish() -> None:
            wait_for(entry, works)
            total = torch.empty_like(flat, dtype=sum_dtype(flat.dtype))
            sum_into(total, inbox, 1.0)
            flat.copy_(total)
            inbox.clear()

        return Pending(finish)

    def _sum_in_two(self, flats: list[Tensor], entry: Entry) -> Pending:
        """Begin to sum large tensors: each rank a part, which it then sends to every peer."""
        size, rank = self.group.size, self.group.rank
        totals = [
            flat.new_empty(-(-flat.numel() // size), dtype=sum_dtype(flat.dtype)) for flat in flats
        ]
        numels = [total.numel() for total in totals]
        reduced = self._reduce_scatter(flats, totals, 1.0, entry)

        def rows(peer: int) -> list[Tensor]:
            return [_row(flat, peer, n) for flat, n in zip(flats, numels, strict=True)]

        def finish() -> None:
            reduced.finish()
            for own, total in zip(rows(rank), totals, strict=True):
                own.copy_(total[: own.numel()])
            totals.clear()
            wait_for(entry, self._swap(send=lambda peer: rows(rank), receive=rows, entry=entry))

        return Pending(finish)

    def meet(self, what: Label) -> None:
        """Return when all ranks have come here; see `Collectives.meet`."""
        entry = self.channel.begin(what)
        mine, theirs = torch.zeros(1), torch.zeros(self.group.size, 1)
        works = self._swap(
            send=lambda peer: [mine], receive=lambda peer: [theirs[peer]], entry=entry
        )
        wait_for(entry, works)

    def gather_transit(self, numels: Sequence[int], dtype: torch.dtype) -> int:
        """Small shards are packed, and unpacked from the rows of all ranks."""
        packed = split_sizes([numel * dtype.itemsize for numel in numels]).packed
        return (1 + self.group.size) * dtype.itemsize * sum(numels[i] for i in packed)

    def reduce_transit(
        self, numels: Sequence[int], dtype: torch.dtype, wire_dtype: torch.dtype
    ) -> int:
        """What peers send; small rows are packed for each of them, and so is their sum."""
        split = split_sizes([numel * dtype.itemsize for numel in numels])
        size, item_bytes = self.group.size, wire_dtype.itemsize
        packed = sum(numels[i] for i in split.packed)
        inboxes = (size - 1) * (packed + sum(numels[i] for i in split.direct))
        return (inboxes + size * packed) * item_bytes + packed * dtype.itemsize

    def all_reduce_transit(self, numels: Sequence[int], dtype: torch.dtype) -> int:
        """Small tensors are packed; peers send them whole, or this rank's part of large ones."""
        size, total = self.group.size, sum_dtype(dtype)
        split = split_sizes([numel * dtype.itemsize for numel in numels])
        packed = sum(numels[i] for i in split.packed)
        flats = [numels[i] for i in split.direct] + ([packed] if packed else [])
        held = packed * dtype.itemsize
        if size == 1 or not flats:
            return held
        if _is_one_message([flat * dtype.itemsize for flat in flats]):
            casts = 2 * total.itemsize if total != dtype else 0  # the first two addends
            return held + flats[0] * ((size - 1) * dtype.itemsize + total.itemsize + casts)
        parts = [-(-flat // size) for flat in flats]
        return held + sum(parts) * total.itemsize + self.reduce_transit(parts, total, dtype)

    def _swap(
        self,
        send: Callable[[int], Sequence[Tensor]],
        receive: Callable[[int], Sequence[Tensor]],
        entry: Entry,
    ) -> list[dist.Work]:
        """Exchange lists of tensors with every peer. Empty tensors are skipped by both ends."""
        size, rank = self.group.size, self.group.rank
        group, works, tag = self.group(), list[dist.Work](), entry.tag
        try:
            for distance in range(1, size):
                source = (rank - distance) % size
                inbox = [tensor for tensor in receive(source) if tensor.numel()]
                works += [group.recv([tensor], source, tag) for tensor in inbox]
            # Peers in the order of their distance: no rank is everybody's first partner.
            for distance in range(1, size):
                target = (rank + distance) % size
                outbox = [tensor for tensor in send(target) if tensor.numel()]
                works += [group.send([tensor], target, tag) for tensor in outbox]
        except RuntimeError as error:  # a connection has ended
            raise explained(entry, broken(entry, error)) from None
        return works


def _fits_one_message(flats: Sequence[Tensor]) -> bool:
    return _is_one_message([flat.numel() * flat.element_size() for flat in flats])


def _is_one_message(sizes: Sequence[int]) -> bool:
    return len(sizes) == 1 and sizes[0] < _TWO_PHASES_BYTES


def _sum(target: Tensor, inbox: Sequence[Tensor], rank: int, scale: float) -> None:
    """Sum what arrived and this rank's own row; with the arithmetic of shared memory."""
    if len(inbox) == 1 or not scales_early(inbox[rank], target, scale):
        sum_into(target, inbox, scale)
        return
    for peer, part in enumerate(inbox):
        if peer != rank:
            part.mul_(scale)
    sum_scaled_into(target, inbox, rank, scale)


def _row(full: Tensor, rank: int, numel: int) -> Tensor:
    """The part of `full` that `rank` owns, without padding: possibly short, possibly empty."""
    return full.view(-1)[rank * numel : (rank + 1) * numel]


def _padded_row(full: Tensor, rank: int, numel: int) -> Tensor:
    row = _row(full, rank, numel)
    missing = numel - row.numel()
    return torch.nn.functional.pad(row, (0, missing)) if missing else row
