"""Sums over ranks, always in the order of the ranks, so that no result depends on timing; and packing of small tensors.

A message has a fixed cost (about 0.1-0.3 ms over gloo on one host), a copy has a cost per byte. Below `DIRECT_BYTES`
the first outweighs the second: small tensors travel together, large ones alone and uncopied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchloom.runtime.base import Collectives, GroupRef, Pending
from torchloom.runtime.channel import Channel, Label, NamedCollective

_BLOCK = 64 << 10
"""Elements that are summed at a time, so that a second pass over them finds them in the cache."""
_TWO_PHASES_BYTES = 256 << 10
"""From here, an all-reduce is cheaper as reduce and gather: each rank sums, and holds, a part of the bytes."""


def sum_into(out: Tensor, parts: Sequence[Tensor], scale: float) -> None:
    """Write the scaled sum over ranks 0, 1, ... into `out`; padding becomes zero.

    Args:
        out: flat; the sum is taken in its dtype.
        parts: one flat tensor per rank, as long as `out` or shorter by its padding.
        scale: factor on the sum.
    """
    numel = parts[0].numel()
    for start in range(0, numel, _BLOCK):
        block = out[start : min(start + _BLOCK, numel)]
        first, *others = (part[start : start + _BLOCK] for part in parts)
        if others:
            torch.add(first.to(out.dtype), others[0].to(out.dtype), out=block)
        else:
            block.copy_(first)
        for part in others[1:]:
            block.add_(part)
        if scale != 1.0:
            block.mul_(scale)
    out[numel:].zero_()


@dataclass(eq=False)
class SumsInRankOrder(Collectives):
    """The collectives of a transport, made of its `gather_as` and `reduce_as`.

    A small tensor goes whole to every rank, and each takes the sum; of a large one each rank sums its part,
    which is gathered. 16 bits are summed in fp32 and rounded once.
    """

    group: GroupRef
    channel: Channel

    @abstractmethod
    def gather_as(
        self, shards: Sequence[Tensor], fulls: Sequence[Tensor], entry: NamedCollective
    ) -> Pending:
        """Begin an all-gather that is part of a collective."""

    @abstractmethod
    def reduce_as(
        self,
        fulls: Sequence[Tensor],
        shards: Sequence[Tensor],
        scale: float,
        entry: NamedCollective,
    ) -> Pending:
        """Begin a reduce-scatter that is part of a collective."""

    def all_gather(self, shards: Sequence[Tensor], fulls: Sequence[Tensor], what: Label) -> Pending:
        """Begin an all-gather; see `Collectives.all_gather`."""
        return self.gather_as(shards, fulls, self.channel.begin(what))

    def reduce_scatter(
        self,
        fulls: Sequence[Tensor],
        shards: Sequence[Tensor],
        scale: float,
        what: Label,
    ) -> Pending:
        """Begin a reduce-scatter; see `Collectives.reduce_scatter`."""
        return self.reduce_as(fulls, shards, scale, self.channel.begin(what))

    def all_reduce(self, tensors: Sequence[Tensor], scale: float, what: Label) -> Pending:
        """Begin an all-reduce; see `Collectives.all_reduce`."""
        entry, size = self.channel.begin(what), self.group.size
        split = split_by_size(tensors)
        packed = [tensors[i] for i in split.packed]
        flats = [tensors[i].view(-1) for i in split.direct]
        if packed:
            flats.append(pack(packed, multiple_of=size))
        small = [flat for flat in flats if not _has_two_phases(flat.numel(), flat.dtype, size)]
        large = [flat for flat in flats if _has_two_phases(flat.numel(), flat.dtype, size)]
        rows = [flat.new_empty(size, flat.numel()) for flat in small]
        gathered = self.gather_as(small, [each.view(-1) for each in rows], entry)
        own = [flat.view(size, -1)[self.group.rank] for flat in large]
        # Of two addends the sum can take the place of one.
        in_place = size == 2
        sums = [
            each if in_place and _wide(each.dtype) == each.dtype else _wide_like(each)
            for each in own
        ]
        reduced = self.reduce_as(large, sums, scale, entry)

        def finish() -> None:
            gathered.finish()
            for flat, addends in zip(small, rows, strict=True):
                total = flat if _wide(flat.dtype) == flat.dtype else _wide_like(flat)
                sum_into(total, addends.unbind(), scale)
                flat.copy_(total)
            rows.clear()
            reduced.finish()
            for part, total in zip(own, sums, strict=True):
                part.copy_(total)
            sums.clear()
            self.gather_as(own, large, entry).finish()
            if packed:
                unpack(flats[-1], packed)

        return Pending(finish)

    def arrive(self, what: Label) -> Pending:
        """Tell the other ranks that this one has come here; the result waits until all have."""
        here, there = torch.zeros(1), torch.zeros(self.group.size)
        return self.gather_as([here], [there], self.channel.begin(what))

    def meet(self, what: Label) -> None:
        """Return when all ranks have come here; see `Collectives.meet`."""
        self.arrive(what).finish()

    def all_reduce_transit(self, numels: Sequence[int], dtype: torch.dtype) -> int:
        """What is packed; what all ranks send of small tensors; the sums of this rank's parts of large ones."""
        size, wide = self.group.size, _wide(dtype)
        split = split_sizes([numel * dtype.itemsize for numel in numels])
        packed = sum(numels[i] for i in split.packed)
        packed += -packed % size
        flats = [numels[i] for i in split.direct] + ([packed] if packed else [])
        small = [flat for flat in flats if not _has_two_phases(flat, dtype, size)]
        most = max(small, default=0)
        sums = most + 2 * min(most, _BLOCK)  # and the first two addends of a block
        parts = [flat // size for flat in flats if _has_two_phases(flat, dtype, size)]
        return (
            (packed + size * sum(small)) * dtype.itemsize
            + (0 if wide == dtype else sums * wide.itemsize)
            + (0 if wide == dtype and size == 2 else sum(parts) * wide.itemsize)
            + self.reduce_transit(parts, wide, dtype)
        )


def _wide_like(flat: Tensor) -> Tensor:
    return torch.empty_like(flat, dtype=_wide(flat.dtype))


def _has_two_phases(numel: int, dtype: torch.dtype, size: int) -> bool:
    return numel * dtype.itemsize >= _TWO_PHASES_BYTES and numel % size == 0


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which whole tensors are summed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


# Measured on gloo, 2 ranks of one host: a 256 KiB message costs about what its two copies cost.
DIRECT_BYTES = 256 << 10


class SplitBySize(NamedTuple):
    """Indices of the tensors that travel alone and of those that are packed."""

    direct: tuple[int, ...]
    packed: tuple[int, ...]


def split_by_size(tensors: Sequence[Tensor]) -> SplitBySize:
    """Divide tensors into those worth a message of their own and the rest.

    A single small tensor travels alone as well: packing it would only add copies.
    """
    return split_sizes([t.numel() * t.element_size() for t in tensors])


def split_sizes(sizes: Sequence[int]) -> SplitBySize:
    """Divide tensors of so many bytes as `split_by_size` does."""
    packed = [i for i, size in enumerate(sizes) if 0 < size < DIRECT_BYTES]
    if len(packed) == 1:
        packed = []
    chosen = set(packed)
    direct = tuple(i for i, size in enumerate(sizes) if i not in chosen and size)
    return SplitBySize(direct, tuple(packed))


def pack(tensors: Sequence[Tensor], multiple_of: int = 1) -> Tensor:
    """Copy tensors of one dtype, end to end, into one flat tensor.

    Args:
        tensors: what to copy.
        multiple_of: zeros at the end bring the number of elements to a multiple of this. They are a part of the one copy:
            padding what is packed already would hold it twice.
    """
    flats = [t.reshape(-1) for t in tensors]
    missing = -sum(each.numel() for each in flats) % multiple_of
    return torch.cat([*flats, flats[0].new_zeros(missing)] if missing else flats)


def unpack(flat: Tensor, into: Sequence[Tensor]) -> None:
    """Copy the front of a flat tensor back out into contiguous tensors, end to end."""
    flats = [tensor.view(-1) for tensor in into]
    numels = [each.numel() for each in flats]
    torch._foreach_copy_(flats, flat[: sum(numels)].split(numels))


def unpack_rows(rows: Tensor, into: Sequence[Tensor]) -> None:
    """Copy the columns of a matrix back out into tensors that hold as many rows, end to end."""
    wholes = [tensor.view(len(rows), -1) for tensor in into]
    torch._foreach_copy_(wholes, rows.split([each.shape[1] for each in wholes], dim=1))
