"""State dicts of shards and torch.distributed.checkpoint, both ways, with other ranks and other kinds of tensors."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from torchloom.errors import ShardError
from torchloom.shard import full_state_dict, sharded_state_dict, state_dict_mode, whole_states
from torchloom.shard.shard_tensor import boxes_of


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 1300), st.integers(0, 1300)
)
@settings(deadline=None, max_examples=200)
def test_boxes_fill_the_range_once_and_in_order(shape, first, last) -> None:
    numel = math.prod(shape)
    first, end = sorted((first % (numel + 1), last % (numel + 1)))
    whole, seen = torch.arange(numel).view(shape), []
    boxes = list(boxes_of(shape, first, end))
    assert len(boxes) <= 2 * len(shape) - 1
    for offsets, sizes, begin in boxes:
        part = (
            whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            .flatten()
            .tolist()
        )
        assert part == list(range(begin, begin + math.prod(sizes)))
        seen += part
    assert seen == list(range(first, end))


class Odd(nn.Module):
    """Weights of one to four dimensions that no number of ranks divides."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 7, 5)
        self.linear = nn.Linear(7, 11)
        self.cube = nn.Parameter(torch.randn(5, 3, 7))
        self.register_buffer("mean", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).mean((2, 3))
        return (self.linear(x) ** 2).mean() + (x @ self.cube[0].T).square().mean()


def odd(seed: int, stage: int = 3) -> Odd:
    return torchloom.shard_model(Odd(seed), stage=stage, persistence_threshold=8)


def trained(rank: int) -> tuple[Odd, torch.optim.Optimizer]:
    """Return a sharded model after two steps, and its optimizer."""
    model = odd(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(2, 3, 8, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in full_state_dict(model).items()}


def save(folder: Path, ranks: int) -> tuple[dict, dict]:
    """Write model and optimizer of `ranks` ranks; return what is in it, whole."""

    def fn(rank: int):
        model, optimizer = trained(rank)
        with state_dict_mode("local"):
            states = get_optimizer_state_dict(model, optimizer)
            weights = model.state_dict()
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
        return whole_of(model), get_optimizer_state_dict(model, optimizer)

    return run_ranks(ranks, fn)[0]


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2), (2, 1)])
def test_other_ranks_read_what_ranks_wrote(tmp_path, first, second) -> None:
    weights, states = save(tmp_path, first)

    def fn(rank: int):
        model = odd(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        whole_states(optimizer)
        with state_dict_mode("local"):
            given = {
                "model": model.state_dict(),
                "optimizer": get_optimizer_state_dict(model, optimizer),
            }
            dcp.load(given, checkpoint_id=tmp_path)
            set_optimizer_state_dict(model, optimizer, given["optimizer"])
        return whole_of(model), get_optimizer_state_dict(model, optimizer)["state"]

    for found, found_states in run_ranks(second, fn):
        assert_same(found, weights)
        for name, state in states["state"].items():
            assert_same(found_states[name], state)


def test_fsdp2_reads_ours_and_we_read_fsdp2s(tmp_path) -> None:
    weights, _ = save(tmp_path / "ours", 2)

    def fn(rank: int):
        mesh = init_device_mesh("cpu", (2,))
        theirs = Odd(7)
        fully_shard(theirs, mesh=mesh)
        given = {"model": theirs.state_dict()}
        dcp.load(given, checkpoint_id=tmp_path / "ours")
        theirs.load_state_dict(given["model"])
        read = {
            n: v.full_tensor() if isinstance(v, DTensor) else v
            for n, v in theirs.state_dict().items()
        }
        dcp.save({"model": theirs.state_dict()}, checkpoint_id=tmp_path / "theirs")
        model = odd(9)
        dcp.load({"model": sharded_state_dict(model)}, checkpoint_id=tmp_path / "theirs")
        return read, whole_of(model)

    for read, found in run_ranks(2, fn):
        assert_same(read, weights)
        assert_same(found, weights)


def test_async_saves_are_right_or_raise(tmp_path) -> None:
    def fn(rank: int):
        model, _ = trained(rank)
        expected = whole_of(model)
        dcp.async_save({"model": sharded_state_dict(model)}, checkpoint_id=tmp_path).result()
        other = odd(5)
        dcp.load({"model": sharded_state_dict(other)}, checkpoint_id=tmp_path)
        return expected, whole_of(other)

    for expected, found in run_ranks(2, fn):
        assert_same(found, expected)


def test_a_writer_that_would_lose_parts_is_refused_on_all_ranks(tmp_path) -> None:
    def fn(rank: int):
        model = odd(1)
        with pytest.raises(CheckpointException, match="HuggingFaceStorageWriter keeps one part"):
            dcp.save(
                sharded_state_dict(model), storage_writer=HuggingFaceStorageWriter(str(tmp_path))
            )

    run_ranks(2, fn)


def test_shards_keep_their_place_and_say_what_they_are_not_for(tmp_path) -> None:
    def fn(rank: int):
        model = torchloom.shard_model(tricky(), stage=3, persistence_threshold=20)
        local = sharded_state_dict(model)
        shard = local["up.weight"]
        torch.save(local, tmp_path / f"{rank}.pt")
        stored = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        copied = copy.deepcopy(shard)
        with torch.no_grad():
            model._modules["up"]._parameters["weight"].mul_(2)
        doubled = torch.equal(shard.local, 2 * copied.local)
        model.load_state_dict(stored)
        back = torch.equal(shard.local, copied.local)
        for use in (lambda: shard + 1, lambda: shard[0], lambda: shard.sum(), shard.numpy):
            with pytest.raises((ShardError, RuntimeError), match=r"use its \.local|numpy"):
                use()
        dist.barrier()
        other = torch.load(tmp_path / f"{1 - rank}.pt", weights_only=True)
        with pytest.raises(ShardError, match="the shard given for 'embed"):
            model.load_state_dict(other)
        model(tokens(0, rank)).backward()
        return doubled, back, tuple(shard.shape), tuple(shard.local.shape), repr(shard)[:44]

    for rank, (doubled, back, shape, local, text) in enumerate(run_ranks(2, fn)):
        assert (doubled, back, shape, local) == (True, True, (17, 12), (102,))
        assert text.startswith(f"ShardTensor(elements {102 * rank} to {102 * rank + 102} of (17")
