"""Every implementation of the collectives computes the same, on odd shapes and several ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks
from support.traffic import W, channel
from torchloom.errors import ShardError
from torchloom.runtime import get_communicator, lookup
from torchloom.runtime.base import GroupRef
from torchloom.runtime.transports import shm
from torchloom.runtime.transports.c10d import C10dCollectives
from torchloom.runtime.transports.gloo import GlooCollectives
from torchloom.shard.shards import cut

# Around the size at which tensors stop being packed, odd, tiny, and empty.
NUMELS = [1, 7, 0, 33, 65_536, 200_003, 2]
IMPLEMENTATIONS = [
    GlooCollectives,
    C10dCollectives,
    shm.connect,
    lambda group, channel: shm.connect(group, channel, slot_bytes=4_096),
]


def whole(rank: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + numel % 97)
    return torch.randn(numel, generator=generator)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_implementation_computes_the_same(world_size: int) -> None:
    def fn(rank):
        for index, implementation in enumerate(IMPLEMENTATIONS):
            transport = implementation(GroupRef(dist.group.WORLD), channel(str(index)))
            numels = [math.ceil(numel / world_size) for numel in NUMELS]
            shards = [cut(whole(9, n), rank, own) for n, own in zip(NUMELS, numels, strict=True)]
            fulls = [torch.full((own * world_size,), math.nan) for own in numels]
            transport.all_gather(shards, fulls, W).finish()
            for numel, full in zip(NUMELS, fulls, strict=True):
                assert torch.equal(full[:numel], whole(9, numel))
            totals = [sum(whole(peer, n) for peer in range(world_size)) / 2 for n in NUMELS]
            sums = [torch.full((own,), math.nan) for own in numels]
            transport.reduce_scatter([whole(rank, n) for n in NUMELS], sums, 0.5, W).finish()
            for total, one in zip(totals, sums, strict=True):
                torch.testing.assert_close(one, cut(total, rank, len(one)), rtol=0, atol=1e-6)
            tensors = [whole(rank, numel) for numel in NUMELS]
            transport.all_reduce(tensors, 0.5, W).finish()
            for total, one in zip(totals, tensors, strict=True):
                torch.testing.assert_close(one, total, rtol=0, atol=0 if world_size == 2 else 1e-6)
            for scale in (0, 1, 7, 40_001):  # the second and third rank send the first nothing
                sent = [
                    [scale * (j + 1) * (i < 1 or j > 0) for j in range(world_size)]
                    for i in range(world_size)
                ]
                values = [whole(i, sum(row)).split(row) for i, row in enumerate(sent)]
                expected = torch.cat([each[rank] for each in values])
                received = torch.full_like(expected, math.nan)
                transport.all_to_all(torch.cat(values[rank]), received, sent, W).finish()
                assert torch.equal(received, expected)

    run_ranks(world_size, fn)


def test_bf16_on_the_wire_adds_up_in_fp32() -> None:
    def fn(rank):
        comm = get_communicator(dist.group.WORLD)
        grad = torch.full((64,), 1.0 if rank == 0 else 2.0**-9)
        shards = comm.begin_reduce([grad], [16], torch.float32, torch.bfloat16, ["w"])
        comm.wait(shards)
        return shards[0][0].item()

    # In bf16 the three small addends would vanish beside the large one.
    assert run_ranks(4, fn)[0] == (1 + 3 * 2.0**-9) / 4


def test_waiting_twice_is_an_error() -> None:
    def fn(rank):
        comm = get_communicator(dist.group.WORLD)
        fulls = comm.begin_gather([torch.ones(8)], torch.float32, ["w"])
        comm.wait(fulls)
        try:
            comm.wait(fulls)
        except ShardError as error:
            return str(error)
        return ""

    assert "not on their way" in run_ranks(2, fn)[0]


def test_unknown_communicator() -> None:
    with pytest.raises(ShardError, match="'nobody'"):
        lookup("nobody")
