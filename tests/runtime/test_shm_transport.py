"""Collectives through shared memory: the bits of gloo's, in every shape, order and number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks
from support.traffic import W, channel
from torchloom.runtime.base import GroupRef
from torchloom.runtime.transports import shm
from torchloom.runtime.transports.gloo import GlooCollectives

NUMELS = [1, 7, 0, 33, 4_096, 20_003, 2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SMALL_SLOT = 4_096  # most tensors take several turns


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * rank + numel)
    # Of very different sizes, so that every order of summation rounds differently.
    exponents = torch.randint(-12, 12, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * 2.0**exponents).to(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("world_size", "slot_bytes"), [(2, SMALL_SLOT), (3, 1 << 20), (8, SMALL_SLOT)]
)
def test_same_bits_as_gloo(world_size: int, slot_bytes: int) -> None:
    def fn(rank):
        group = GroupRef(dist.group.WORLD)
        ours, theirs = (
            shm.connect(group, channel("ours"), slot_bytes),
            GlooCollectives(group, channel("theirs")),
        )
        wrong = []
        for dtype in DTYPES:
            fulls = [values(rank, numel, dtype) for numel in NUMELS]
            for out in {dtype, torch.float32}:
                got, want = (
                    [torch.full((math.ceil(n / world_size),), math.nan, dtype=out) for n in NUMELS]
                    for _ in range(2)
                )
                ours.reduce_scatter(fulls, got, 1 / world_size, W).finish()
                theirs.reduce_scatter(fulls, want, 1 / world_size, W).finish()
                wrong += [
                    ("reduce", dtype, out)
                    for a, b in zip(got, want, strict=True)
                    if not same_bits(a, b)
                ]
            shards = [values(rank, math.ceil(n / world_size), dtype) for n in NUMELS]
            got, want = (
                [torch.empty(s.numel() * world_size, dtype=dtype) for s in shards] for _ in "ab"
            )
            ours.all_gather(shards, got, W).finish()
            theirs.all_gather(shards, want, W).finish()
            wrong += [
                ("gather", dtype) for a, b in zip(got, want, strict=True) if not same_bits(a, b)
            ]
            got, want = ([f.clone() for f in fulls] for _ in "ab")
            ours.all_reduce(got, 1 / 3, W).finish()
            theirs.all_reduce(want, 1 / 3, W).finish()
            wrong += [("all", dtype) for a, b in zip(got, want, strict=True) if not same_bits(a, b)]
        return wrong

    assert run_ranks(world_size, fn) == [[]] * world_size


def test_all_reduce_adds_in_rank_order_and_is_equal_on_all_ranks() -> None:
    # One phase, two, one that does not divide; each beside a small one.
    cases = [(n, dtype) for n in (5, 300_000, 300_001) for dtype in DTYPES[:2]]

    def fn(rank):
        transport = shm.connect(GroupRef(dist.group.WORLD), channel(), SMALL_SLOT)
        found = []
        for numel, dtype in cases:
            tensors = [values(rank, n, dtype) for n in (numel, 3)]
            transport.all_reduce(tensors, 1 / 3, W).finish()
            found.append(tensors)
        return found

    results = run_ranks(3, fn)
    for (numel, dtype), *by_rank in zip(cases, *results, strict=True):
        for place, n in enumerate((numel, 3)):
            total = sum(values(rank, n, dtype).float() for rank in range(3))
            wanted = total.mul_(1 / 3).to(dtype)
            assert all(same_bits(tensors[place], wanted) for tensors in by_rank), (numel, dtype)


@pytest.mark.parametrize("world_size", [2, 3])
def test_more_in_flight_than_there_are_slots(world_size: int) -> None:
    def fn(rank):
        ours = shm.connect(GroupRef(dist.group.WORLD), channel(), SMALL_SLOT)
        started = []
        for turn in range(7):
            shard = torch.full((50 + 900 * turn,), float(10 * turn + rank))
            full = torch.empty(len(shard) * world_size)
            started.append((ours.all_gather([shard], [full], W), full))
        grad = torch.full((world_size * 3_000,), float(rank + 1))
        mine = torch.empty(3_000)
        started.append((ours.reduce_scatter([grad], [mine], 1.0, W), mine))
        # The last first: what was begun before it is completed with it.
        started[-1][0].finish()
        for pending, _ in started[:-1]:
            pending.finish()
        rows = [full.view(world_size, -1)[:, [0, -1]].tolist() for _, full in started[:-1]]
        return rows, mine.unique().tolist()

    want = [[[10.0 * turn + r] * 2 for r in range(world_size)] for turn in range(7)]
    total = float(sum(range(1, world_size + 1)))
    assert run_ranks(world_size, fn) == [(want, [total])] * world_size


def test_a_rank_that_is_ahead_waits_for_nobody_while_slots_last() -> None:
    def fn(rank):
        ours = shm.connect(GroupRef(dist.group.WORLD), channel(), SMALL_SLOT)
        store = dist.distributed_c10d._get_default_store()
        mine = [torch.empty(500) for _ in range(8)]
        started = []
        for turn, part in enumerate(mine):
            if (rank, turn) == (1, 0):
                store.wait(["ahead"])  # set when the other rank has begun four
            grad = torch.full((1_000,), float(10 * turn + rank))
            started.append(ours.reduce_scatter([grad], [part], 1.0, W))
            if (rank, turn) == (0, 3):
                store.set("ahead", "yes")
        for pending in started:
            pending.finish()
        return [part.unique().tolist() for part in mine]

    assert run_ranks(2, fn) == [[[20.0 * turn + 1] for turn in range(8)]] * 2


def test_many_rounds_with_ranks_that_take_turns_to_be_late() -> None:
    def fn(rank):
        ours = shm.connect(GroupRef(dist.group.WORLD), channel(), SMALL_SLOT)
        burn = torch.randn(64, 64)
        for turn in range(300):
            for _ in range(40 if turn % 3 == rank else 0):
                burn = (burn @ burn).tanh()
            grads = torch.arange(3 * 501, dtype=torch.float32) * (rank + 1) + turn
            mine = torch.empty(501)
            ours.reduce_scatter([grads], [mine], 1.0, W).finish()
            want = (torch.arange(3 * 501.0) * 6 + 3 * turn).view(3, -1)[rank]
            if not torch.equal(mine, want):
                return turn
        return None

    assert run_ranks(3, fn) == [None] * 3
