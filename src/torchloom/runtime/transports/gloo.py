"""Collectives over gloo, each by the cheapest of gloo's own operations.

Measured between 2 ranks of one host, 12 MB in all (milliseconds): all-gather 11, one broadcast per
rank 5-9, one message per peer 5; 64 MB: reduce-scatter 94, all-reduce 51, one message per peer and a
local sum 31. Hence both gathers and reductions are direct messages:

* gather = each rank sends its shard to every peer, and receives straight into the results: no
  staging copy at all;
* reduce = each rank sends every peer the slice that the peer owns and sums what it receives, in
  rank order, so that the result does not depend on timing; the wire carries each byte once;
* all-reduce = small tensors go whole to every peer, large ones are reduced and gathered (`summing`).

Receives are posted before sends, so that no message waits for a buffer. Messages carry the key of
their collective as the tag, and gloo delivers a message only to a receive of its tag: ranks that run
different programs wait, which `runtime.lines` ends, and never read what was meant for another tensor.

Tensors of a GPU travel through host memory, so that ranks can share one: slower than NCCL, which refuses that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchloom.errors import TorchloomError
from torchloom.runtime.base import Pending
from torchloom.runtime.channel import Label, NamedCollective
from torchloom.runtime.lines import broken, explained, wait_for
from torchloom.runtime.transports.summing import (
    SumsInRankOrder,
    pack,
    split_by_size,
    split_sizes,
    sum_into,
    unpack,
    unpack_rows,
)
from torchloom.shard.shards import slice_of


class GlooCollectives(SumsInRankOrder):
    """Gathers and reductions as direct messages between all pairs of ranks."""

    def gather_as(
        self, shards: Sequence[Tensor], fulls: Sequence[Tensor], entry: NamedCollective
    ) -> Pending:
        """Begin an all-gather that is part of a collective."""
        split = split_by_size(shards)
        size, rank = self.group.size, self.group.rank
        sources = [shards[i] for i in split.direct]
        places = [fulls[i].view(size, -1) for i in split.direct]
        packed = [fulls[i] for i in split.packed]
        if packed:
            mine = pack([shards[i] for i in split.packed])
            rows = mine.new_empty(size, mine.numel())
            sources.append(mine)
            places.append(rows)
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
                unpack_rows(places[-1], packed)
            sources.clear()
            places.clear()

        return Pending(finish)

    def reduce_as(
        self,
        fulls: Sequence[Tensor],
        shards: Sequence[Tensor],
        scale: float,
        entry: NamedCollective,
    ) -> Pending:
        """Begin a reduce-scatter that is part of a collective."""
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
                    pack([slice_of(fulls[i], shards[i].numel(), peer) for i in split.packed])
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
                sum_into(target, inbox, scale)
            if split.packed:
                unpack(targets[-1], small)
            rows.clear()
            inboxes.clear()

        return Pending(finish)

    def all_to_all(
        self, sent: Tensor, received: Tensor, numels: Sequence[Sequence[int]], what: Label
    ) -> Pending:
        """Begin an all-to-all; see `Collectives.all_to_all`."""
        entry, rank = self.channel.begin(what), self.group.rank
        parts = list(sent.split(list(numels[rank])))
        places = received.split([row[rank] for row in numels])
        places[rank].copy_(parts[rank])
        works = self._swap(
            send=lambda peer: [parts[peer]], receive=lambda peer: [places[peer]], entry=entry
        )

        def finish() -> None:
            wait_for(entry, works)
            parts.clear()

        return Pending(finish)

    def gather_transit(self, numels: Sequence[int], dtype: torch.dtype) -> int:
        """Small shards are packed, and unpacked from the rows of all ranks."""
        packed = split_sizes([numel * dtype.itemsize for numel in numels]).packed
        return (1 + self.group.size) * dtype.itemsize * sum(numels[i] for i in packed)

    def reduce_transit(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        full_numels: Sequence[int] | None = None,
    ) -> int:
        """What peers send; small rows are packed for each of them, and so is their sum."""
        split = split_sizes([numel * dtype.itemsize for numel in numels])
        size, item_bytes = self.group.size, wire_dtype.itemsize
        packed = sum(numels[i] for i in split.packed)
        inboxes = (size - 1) * (packed + sum(numels[i] for i in split.direct))
        return (inboxes + size * packed) * item_bytes + packed * dtype.itemsize

    def _swap(
        self,
        send: Callable[[int], Sequence[Tensor]],
        receive: Callable[[int], Sequence[Tensor]],
        entry: NamedCollective,
    ) -> list[dist.Work]:
        """Exchange lists of tensors with every peer. Empty tensors are skipped by both ends."""
        works, peers = list[dist.Work](), self._peers()
        with _posting(entry):
            for source in reversed(peers):
                works += [w for t in receive(source) for w in self._receive(t, source, entry)]
            for target in peers:
                works += [w for t in send(target) for w in self._send(t, target, entry)]
        return works

    def _peers(self) -> list[int]:
        """Return the other ranks by their distance: no rank is everybody's first partner."""
        size, rank = self.group.size, self.group.rank
        return [(rank + distance) % size for distance in range(1, size)]

    def _receive(self, into: Tensor, source: int, entry: NamedCollective) -> list[Any]:
        if not into.numel():
            return []
        if not _is_far(into):
            return [self.group().recv([into], source, entry.tag)]
        host = torch.empty_like(into, device="cpu")
        return [_Landing(self.group().recv([host], source, entry.tag), host, into)]

    def _send(self, tensor: Tensor, target: int, entry: NamedCollective) -> list[dist.Work]:
        if not tensor.numel():
            return []
        host = tensor.cpu() if _is_far(tensor) else tensor  # the work holds it
        return [self.group().send([host], target, entry.tag)]


class _Landing(NamedTuple):
    """A message that is copied to its device when it has come."""

    work: dist.Work
    host: Tensor
    into: Tensor

    def wait(self, limit: timedelta) -> None:
        self.work.wait(limit)
        self.into.copy_(self.host)


def _is_far(tensor: Tensor) -> bool:
    """Say whether a tensor is where gloo cannot read: it takes the address of a message for one of the host's."""
    return tensor.device.type != "cpu"


@contextmanager
def _posting(entry: NamedCollective) -> Iterator[None]:
    """Turn what gloo says of an ended connection into the sentence that explains it."""
    try:
        yield
    except TorchloomError:
        raise
    except RuntimeError as error:
        raise explained(entry, broken(entry, error)) from None


def _row(full: Tensor, rank: int, numel: int) -> Tensor:
    """The part of `full` that `rank` owns, without padding: possibly short, possibly empty."""
    return full.view(-1)[rank * numel : (rank + 1) * numel]
