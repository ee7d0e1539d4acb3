"""Over torch's own collectives a bucket is one call where the group can coalesce, in equal order on all ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import torchloom
from support.gpu import gpu, one_rank
from support.models import tricky
from support.ranks import run_ranks
from support.recording import recording_group
from support.runs import settings, train
from support.traffic import W, channel, collectives_of, held_bytes
from torchloom.runtime import get_communicator, transit_bytes
from torchloom.runtime.base import GroupRef
from torchloom.runtime.transports.c10d import C10dCollectives
from torchloom.shard.shards import cut, shard_numel_of

F32, BF16 = torch.float32, torch.bfloat16
NUMELS = [1, 7, 0, 33, 4096, 20_003, 64]
GATHER = {True: "all_gather_single_coalesced", False: "all_gather_single"}
REDUCE = {True: "reduce_scatter_single_coalesced", False: "reduce_scatter_single"}
SUM = {True: "allreduce_coalesced", False: "allreduce"}

if not hasattr(torch.distributed, "all_gather_single"):  # torch 2.11 and 2.12
    GATHER = {True: "allgather_into_tensor_coalesced", False: "_allgather_base"}
    REDUCE = {True: "reduce_scatter_tensor_coalesced", False: "_reduce_scatter_base"}

both = pytest.mark.parametrize("coalesces", [False, True])


def whole(rank: int, numel: int, dtype=F32) -> torch.Tensor:
    """Return small integers, so that sums are exact in every dtype and order."""
    return ((torch.arange(numel) * 7 + rank) % 16).to(dtype)


def collectives(coalesces: bool):
    group = recording_group(coalesces=coalesces)
    return group, C10dCollectives(GroupRef(group), channel())


def calls_of(names, coalesces: bool) -> list[str]:
    """Return the calls of one bucket: one, or one for each tensor that is not empty."""
    return [names[True]] if coalesces else [names[False]] * sum(map(bool, NUMELS))


def equal_on_all(results):
    """Return what all ranks recorded."""
    assert all(each == results[0] for each in results), results
    return results[0]


def gathers(transport, rank: int, size: int, dtype) -> None:
    shards = [cut(whole(9, n, dtype), rank, shard_numel_of(n, size)) for n in NUMELS]
    fulls = [torch.full((len(s) * size,), math.nan, dtype=dtype) for s in shards]
    transport.all_gather(shards, fulls, W).finish()
    for numel, full in zip(NUMELS, fulls, strict=True):
        assert torch.equal(full[:numel], whole(9, numel, dtype))
        assert not full[numel:].any()


def reduces(transport, rank: int, size: int, wire, dtype) -> None:
    fulls = [whole(rank, n, wire) for n in NUMELS]
    shards = [torch.full((shard_numel_of(n, size),), math.nan, dtype=dtype) for n in NUMELS]
    transport.reduce_scatter(fulls, shards, 0.5, W).finish()
    for numel, shard, full in zip(NUMELS, shards, fulls, strict=True):
        total = sum(whole(peer, numel) for peer in range(size)) * 0.5
        assert torch.equal(shard.float(), cut(total, rank, len(shard)))  # padding is zero
        assert torch.equal(full, whole(rank, numel, wire))  # what was handed in stays


def sums(transport, rank: int, size: int, dtype) -> None:
    tensors = [whole(rank, n, dtype) for n in NUMELS]
    transport.all_reduce(tensors, 0.25, W).finish()
    for numel, tensor in zip(NUMELS, tensors, strict=True):
        total = sum(whole(peer, numel) for peer in range(size)) * 0.25
        assert torch.equal(tensor.float(), total)


@both
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_bucket_is_one_collective(world_size: int, coalesces: bool) -> None:
    cases = [
        (act, names, (dtype,))
        for act, names in ((gathers, GATHER), (sums, SUM))
        for dtype in (F32, BF16)
    ]
    cases += [
        (reduces, REDUCE, pair) for pair in ((F32, F32), (BF16, F32), (F32, BF16), (BF16, BF16))
    ]

    def fn(rank):
        found = []
        for act, _, dtypes in cases:
            group, transport = collectives(coalesces)
            act(transport, rank, world_size, *dtypes)
            found.append([(call.name, call.numels) for call in group.calls])
        return found

    found = equal_on_all(run_ranks(world_size, fn))
    for (act, names, _), calls in zip(cases, found, strict=True):
        assert [name for name, _ in calls] == calls_of(names, coalesces)
        if act is reduces:
            shards = [shard_numel_of(n, world_size) for n in NUMELS if n]
            assert [n for _, numels in calls for n in numels] == shards


@gpu
def test_nccl_with_one_rank() -> None:
    """The bodies of the test above, over NCCL's own collectives and streams."""
    with one_rank("cuda"), torch.device("cuda"):
        transport = C10dCollectives(GroupRef(torch.distributed.group.WORLD), channel())
        assert transport.coalesces
        for dtype in (F32, BF16):
            gathers(transport, 0, 1, dtype)
            sums(transport, 0, 1, dtype)
            for wire in (F32, BF16):
                reduces(transport, 0, 1, wire, dtype)


@both
def test_one_tensor_and_none(coalesces: bool) -> None:
    def fn(rank):
        group, transport = collectives(coalesces)
        empty, one = torch.empty(0), whole(rank, 6)
        transport.all_gather([empty, empty], [empty, empty], W).finish()
        transport.reduce_scatter([empty], [empty], 1.0, W).finish()
        transport.all_reduce([empty, empty], 1.0, W).finish()
        assert group.calls == []
        transport.all_gather([empty, one], [empty, torch.empty(12)], W).finish()
        shard = torch.empty(3)
        transport.reduce_scatter([one, empty], [shard, empty], 1.0, W).finish()
        assert torch.equal(shard, (whole(0, 6) + whole(1, 6))[3 * rank : 3 * rank + 3])
        transport.all_reduce([one, empty], 1.0, W).finish()
        return group.calls

    calls = equal_on_all(run_ranks(2, fn))
    assert [(call.name, call.numels) for call in calls] == [
        (GATHER[False], (12,)),
        (REDUCE[False], (3,)),
        (SUM[False], (6,)),
    ]


@both
def test_memory_under_way_is_what_the_planner_is_told(coalesces: bool) -> None:
    def fn(rank):
        size = 3
        group = recording_group(coalesces=coalesces)
        group.is_silent = True  # gloo's own copies on the CPU are not the transport's
        handle = get_communicator(group).handle
        rows = []
        for numels in ([3000], [3000, 80_000, 0, 70], [60_000, 3001, 80_001]):
            for dtype, wire in ((F32, F32), (BF16, F32), (F32, BF16)):
                for start, args in collectives_of(numels, dtype, wire, size, handle):
                    measured = held_bytes(start, args, handle)
                    rows.append((str(start), numels, wire, transit_bytes(start, args), measured))
        return rows

    for rows in run_ranks(3, fn):
        for start, numels, wire, predicted, measured in rows:
            assert predicted <= measured <= predicted + 64, (start, numels, wire)


@pytest.mark.parametrize("stage", [1, 3])
def test_buckets_of_a_compiled_model_save_collectives(stage: int) -> None:
    def trained(group, passes):
        engine, _ = engine_over(group, stage)
        engine.compile(backend="aot_eager", passes=passes)
        group.calls.clear()
        losses = train(engine, group.rank(), steps=3)
        return group.calls[:], losses

    def fn(rank):
        group = recording_group(coalesces=True)
        return [trained(group, [f"zero{stage}", "place", *more]) for more in ([], ["bucket"])]

    (apart, losses), (together, same_losses) = equal_on_all_but_losses(run_ranks(2, fn))
    assert losses == same_losses
    assert len(together) < len(apart) - 6
    merged = [call for call in together if call.name in (GATHER[True], REDUCE[True])]
    assert merged
    assert sum(sum(call.numels) for call in together) == sum(sum(call.numels) for call in apart)


def engine_over(group, stage: int):
    mesh = DeviceMesh.from_group(group, "cpu")
    model = tricky()
    engine, *_ = torchloom.initialize(model=model, config=settings(stage), mesh=mesh)
    return engine, model


def equal_on_all_but_losses(results):
    """Return rank 0's runs; calls are equal on all ranks."""
    assert all([run[0] for run in each] == [run[0] for run in results[0]] for each in results)
    return results[0]
