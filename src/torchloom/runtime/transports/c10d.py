"""Collectives over any backend of torch.distributed that has native tensor collectives (NCCL).

A bucket is one launch for each dtype among its tensors where the group can coalesce them, as NCCL can; else each
tensor is a collective of its own. Nothing is packed: results are written in place.

A reduction sends equal slices. A full tensor that does not divide by the ranks is copied once into
a padded one, whose padding is zero, so that no rank receives its neighbour's bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from torchloom._torch.distributed import (
    all_gather_coalesced,
    all_gather_single,
    all_reduce_coalesced,
    reduce_scatter_coalesced,
    reduce_scatter_single,
    supports_coalescing,
)
from torchloom.runtime.base import Collectives, GroupRef, Pending
from torchloom.runtime.channel import Channel, Label
from torchloom.runtime.lines import wait_for
from torchloom.shard.shards import slice_of


@dataclass(frozen=True)
class C10dCollectives(Collectives):
    """The group's own all-gather, reduce-scatter, all-reduce and all-to-all."""

    group: GroupRef
    channel: Channel

    @cached_property
    def coalesces(self) -> bool:
        """Whether several tensors travel by one collective without being packed."""
        return supports_coalescing(self.group())

    def all_gather(self, shards: Sequence[Tensor], fulls: Sequence[Tensor], what: Label) -> Pending:
        """Begin an all-gather; see `Collectives.all_gather`."""
        return self._begin(what, all_gather_single, all_gather_coalesced, fulls, shards)

    def reduce_scatter(
        self, fulls: Sequence[Tensor], shards: Sequence[Tensor], scale: float, what: Label
    ) -> Pending:
        """Begin a reduce-scatter; see `Collectives.reduce_scatter`."""
        size = self.group.size
        sources = [
            slice_of(full, size * s.numel(), 0) for full, s in zip(fulls, shards, strict=True)
        ]
        # What is summed in another dtype is cast at the end.
        sums = [
            shard if shard.dtype == full.dtype else full.new_empty(shard.shape)
            for full, shard in zip(fulls, shards, strict=True)
        ]
        return self._begin(
            what,
            reduce_scatter_single,
            reduce_scatter_coalesced,
            sums,
            sources,
            lambda: _scale_into(shards, sums, scale),
        )

    def all_reduce(self, tensors: Sequence[Tensor], scale: float, what: Label) -> Pending:
        """Begin an all-reduce; see `Collectives.all_reduce`."""
        return self._begin(
            what,
            lambda tensor, _, **options: dist.all_reduce(tensor, **options),
            lambda group, tensors, _: all_reduce_coalesced(group, tensors),
            tensors,
            tensors,
            lambda: _scale_into(tensors, tensors, scale),
        )

    def all_to_all(
        self, sent: Tensor, received: Tensor, numels: Sequence[Sequence[int]], what: Label
    ) -> Pending:
        """Begin an all-to-all; see `Collectives.all_to_all`."""
        entry, rank = self.channel.begin(what), self.group.rank
        work = dist.all_to_all_single(
            received,
            sent,
            [row[rank] for row in numels],
            list(numels[rank]),
            group=self.group(),
            async_op=True,
        )
        works, held = [] if work is None else [work], [sent]

        def finish() -> None:
            wait_for(entry, works, on_stream=True)
            held.clear()

        return Pending(finish)

    def meet(self, what: Label) -> None:
        """Note that this rank has come here; see `Collectives.meet`."""
        self.channel.begin(what)

    def reduce_transit(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        full_numels: Sequence[int] | None = None,
    ) -> int:
        """Padded copies, and sums to be cast."""
        wholes = [self.group.size * numel for numel in numels]
        fulls = wholes if full_numels is None else full_numels
        padded = sum(whole for whole, full in zip(wholes, fulls, strict=True) if whole != full)
        return (padded + (0 if dtype == wire_dtype else sum(numels))) * wire_dtype.itemsize

    def _begin(
        self,
        what: Label,
        one: Callable[..., dist.Work],
        together: Callable[..., dist.Work],
        results: Sequence[Tensor],
        sources: Sequence[Tensor],
        then: Callable[[], None] = lambda: None,
    ) -> Pending:
        """Begin a collective on each tensor, or on all of a dtype; `then` runs when they have ended.

        On a GPU the wait blocks the current stream, not this thread.
        """
        entry, group = self.channel.begin(what), self.group()
        works, held = list[dist.Work](), list(sources)
        for into, given in _by_dtype(results, sources):
            if len(given) > 1 and self.coalesces:
                works.append(together(group, into, given))
            else:
                pairs = zip(into, given, strict=True)
                works += [one(to, of, group=group, async_op=True) for to, of in pairs]

        def finish() -> None:
            wait_for(entry, works, on_stream=True)
            held.clear()
            then()

        return Pending(finish)


def _by_dtype(
    results: Sequence[Tensor], sources: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Group pairs by the dtype of what is sent, in the order of their first; drop empty ones."""
    found: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for result, source in zip(results, sources, strict=True):
        if source.numel():
            found[source.dtype][0].append(result)
            found[source.dtype][1].append(source)
    yield from found.values()


def _scale_into(targets: Sequence[Tensor], sums: Sequence[Tensor], scale: float) -> None:
    """Write scaled sums into tensors of the same or another dtype.

    Each is scaled in the wider of its two dtypes. A step is one launch for all tensors.
    """
    pairs = [(to, one) for to, one in zip(targets, sums, strict=True) if to.numel()]
    _scale([one for to, one in pairs if to.element_size() < one.element_size()], scale)
    moved = [(to, one) for to, one in pairs if to is not one]
    if moved:
        torch._foreach_copy_([to for to, _ in moved], [one for _, one in moved])
    _scale([to for to, one in pairs if to.element_size() >= one.element_size()], scale)


def _scale(tensors: list[Tensor], scale: float) -> None:
    if tensors and scale != 1.0:
        torch._foreach_mul_(tensors, scale)
