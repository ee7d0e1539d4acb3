"""Whole weights in memory that the ranks share: each rank owns a slice, all read all of it.

    same dtype    the parameter's data *is* the slice: nothing is copied, one host holds it once
    another       the slice is a cast copy of the parameter, made anew when a graph begins to read

A graph reads between two barriers (see `torchloom.ops.lowered`). Whatever writes parameters does so
outside of them, on its own slice: the optimizer, a checkpoint, user code.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchloom.errors import ShardError
from torchloom.ops.replays import never
from torchloom.runtime.channel import label
from torchloom.runtime.communicator import Communicator
from torchloom.runtime.exchanges import group_exchange
from torchloom.runtime.transports.shm.arena import ALIGNMENT, make_arena
from torchloom.runtime.transports.shm.collectives import SharedMemoryCollectives


@dataclass(frozen=True)
class Region:
    """One weight: all of it with padding, and the slice of it that this rank writes."""

    whole: Tensor
    own: Tensor


class WeightStore:
    """The shared weights of one model over one communicator."""

    def __init__(
        self,
        name: str,
        comm: Communicator,
        transport: SharedMemoryCollectives,
        regions: list[Region],
    ) -> None:
        self.name = name
        self.regions = regions
        self._comm, self._transport = comm, transport

    def begin(self, shards: Sequence[Tensor], params: Sequence[int]) -> list[Tensor]:
        """Let the others read this rank's slices; `Communicator.wait` waits for theirs.

        Args:
            shards: the parameters' data, which need not lie in the store: user code may have
                put other data in its place.
            params: their places in the store.

        Returns:
            Flat whole weights, padding included.
        """
        self._comm.shard_group()  # says so, if it has been destroyed
        regions = [self.regions[index] for index in params]
        wholes = [region.whole.view(-1) for region in regions]
        elsewhere = []
        for index, (shard, region) in enumerate(zip(shards, regions, strict=True)):
            if shard.dtype != region.own.dtype:
                region.own.copy_(shard.detach())
            elif shard.data_ptr() != region.own.data_ptr():
                elsewhere.append(index)
        self._gather([shards[i] for i in elsewhere], elsewhere, wholes)
        numbers = [f"weight {index}" for index in params]
        here = label("begin to read shared memory", numbers, model=self._comm.model)
        pending = self._transport.arrive(here)
        never("ranks read its weights in shared memory")
        self._comm.begin("gather", wholes, pending)
        return wholes

    def done(self) -> None:
        """Return when all ranks have finished reading."""
        self._transport.meet(label("end of reading shared memory", model=self._comm.model))

    def _gather(self, shards: list[Tensor], places: list[int], wholes: list[Tensor]) -> None:
        """Gather what is not in the store the ordinary way."""
        if shards:
            names = [f"weight {place}" for place in places]
            fulls = self._comm.begin_gather(shards, shards[0].dtype, names)
            self._comm.wait(fulls)
            for place, full in zip(places, fulls, strict=True):
                wholes[place] = full


_STORES: weakref.WeakValueDictionary[str, WeightStore] = weakref.WeakValueDictionary()
_NUM_MADE: dict[str, int] = {}


def make_store(
    comm: Communicator, numels: Sequence[int], dtypes: Sequence[torch.dtype]
) -> WeightStore:
    """Make a store together with the other ranks; all must call alike.

    Args:
        comm: ranks that share memory.
        numels: elements of each weight's shard, padding included.
        dtypes: in which each weight is read.

    Raises:
        UnavailableError: the memory cannot be had; on all ranks.
    """
    transport = comm.shard
    assert isinstance(transport, SharedMemoryCollectives), type(transport).__name__
    size, rank = comm.world_size, comm.rank
    starts, end = [], 0
    for numel, dtype in zip(numels, dtypes, strict=True):
        starts.append(end)
        end += -(-numel * size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    exchange = group_exchange(comm.shard_group)
    arena = make_arena(list(transport.link.peers), rank, exchange, end)
    regions = [
        Region(
            arena.tensor(start, numel * size, dtype),
            arena.tensor(start + rank * numel * dtype.itemsize, numel, dtype),
        )
        for start, numel, dtype in zip(starts, numels, dtypes, strict=True)
    ]
    serial = _NUM_MADE[comm.handle] = _NUM_MADE.get(comm.handle, -1) + 1
    name = f"{comm.handle}/{serial}"
    _STORES[name] = store = WeightStore(name, comm, transport, regions)
    return store


def find_store(name: str) -> WeightStore:
    """Return the store that a graph names.

    Raises:
        ShardError: it is gone with its engine.
    """
    store = _STORES.get(name)
    if store is None:
        raise ShardError(
            f"compiled code reads shared weights {name!r} of an engine that has been destroyed: "
            "call the model of a living engine, or compile it again"
        )
    return store
