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
from torchloom.runtime.transports.summing import pack, split_by_size, unpack
from torchloom.shard.shards import cut

# Around the size at which tensors stop being packed, odd, tiny, and empty.
NUMELS = [1, 7, 0, 33, 65_536, 200_003, 2]
IMPLEMENTATIONS = [GlooCollectives, C10dCollectives, shm.connect]


def whole(rank: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + numel % 97)
    return torch.randn(numel, generator=generator)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_gather(implementation, world_size: int) -> None:
    def fn(rank):
        shards, fulls, expected = [], [], []
        for numel in NUMELS:
            per_rank = math.ceil(numel / world_size)
            source = whole(9, numel)
            shards.append(cut(source, rank, per_rank))
            fulls.append(torch.full((per_rank * world_size,), math.nan))
            expected.append(source)
        implementation(GroupRef(dist.group.WORLD), channel()).all_gather(shards, fulls, W).finish()
        return [
            torch.equal(full[: len(want)], want) for full, want in zip(fulls, expected, strict=True)
        ]

    assert all(all(result) for result in run_ranks(world_size, fn))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_reduce_scatter(implementation, world_size: int) -> None:
    def fn(rank):
        fulls = [whole(rank, numel) for numel in NUMELS]
        shards = [torch.full((math.ceil(n / world_size),), math.nan) for n in NUMELS]
        implementation(GroupRef(dist.group.WORLD), channel()).reduce_scatter(
            fulls, shards, 1 / world_size, W
        ).finish()
        errors = []
        for numel, shard in zip(NUMELS, shards, strict=True):
            total = sum(whole(peer, numel) for peer in range(world_size)) / world_size
            want = cut(total, rank, len(shard))
            errors.append((shard - want).abs().max().item() if numel else 0.0)
        return max(errors)

    assert max(run_ranks(world_size, fn)) < 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_all_reduce(implementation) -> None:
    def fn(rank):
        tensors = [whole(rank, numel).view(-1) for numel in NUMELS]
        implementation(GroupRef(dist.group.WORLD), channel()).all_reduce(tensors, 0.5, W).finish()
        want = [(whole(0, numel) + whole(1, numel)) / 2 for numel in NUMELS]
        return all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))

    assert all(run_ranks(2, fn))


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


def test_packing() -> None:
    tensors = [torch.arange(3.0), torch.zeros(0), torch.arange(100_000.0), torch.arange(5.0)]
    split = split_by_size(tensors)
    assert split.direct == (2,)
    assert split.packed == (0, 3)
    copies = [torch.empty_like(tensors[i]) for i in split.packed]
    unpack(pack([tensors[i] for i in split.packed]), copies)
    assert all(torch.equal(tensors[i], c) for i, c in zip(split.packed, copies, strict=True))
    assert split_by_size(tensors[:1]) == ((0,), ())
