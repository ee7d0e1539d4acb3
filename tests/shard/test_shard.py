"""Sharding in place: layouts, identities, whole weights on request, models that start on meta."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchloom
from support.models import Tricky, tokens, tricky
from support.pool import run_ranks
from torchloom.errors import ShardError
from torchloom.shard import (
    default_threshold,
    gathered,
    local_shard,
    on_meta,
    plan_layout,
    shard_module,
    unshard,
)
from torchloom.shard.shards import cut, join, valid_numel


@given(st.integers(1, 300), st.integers(1, 9))
def test_shards_put_together_are_the_whole(numel: int, world_size: int) -> None:
    whole = torch.arange(1, numel + 1)
    shard_numel = -(-numel // world_size)
    shards = [cut(whole, rank, shard_numel) for rank in range(world_size)]
    assert torch.equal(join(torch.cat(shards), [numel]), whole)
    assert sum(valid_numel(numel, rank, shard_numel) for rank in range(world_size)) == numel
    assert all(shard.numel() == shard_numel for shard in shards)


def plan(model: nn.Module, **facts):
    return plan_layout(model, **{"stage": 3, "world_size": 2, "rank": 0, "handle": "t", **facts})


def test_identity_names_and_classes_survive() -> None:
    model = tricky()
    before = dict(model.named_parameters())
    before_shapes = {name: param.shape for name, param in before.items()}
    shard_module(model, plan(model, persistence_threshold=20))
    assert isinstance(model, Tricky)
    assert isinstance(model.up, nn.Linear)
    assert type(model.up) is type(nn.Linear(1, 1)) or type(model.up).__name__ == "Linear"
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    assert after["up.weight"].shape == before_shapes["up.weight"]
    assert local_shard(after["up.weight"]).shape == (102,)


def test_pickle_is_refused_with_a_way_out() -> None:
    model = tricky()
    shard_module(model, plan(model))
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(model)


def test_shard_twice() -> None:
    model = tricky()
    shard_module(model, plan(model))
    with pytest.raises(ShardError, match="already sharded"):
        shard_module(model, plan(tricky()))


def test_gathered_reads_and_writes_back() -> None:
    def fn(rank):
        model = tricky()
        torchloom.shard_model(model, persistence_threshold=20)
        with gathered(model, ["up.weight"]):
            read = model.up.weight.detach().clone()
            nn.init.zeros_(model.up.weight)
            nn.init.zeros_(model.up.bias)  # whole on every rank, thrown away all the same
        assert torch.equal(model.state_dict()["up.bias"], tricky().up.bias)
        kept = model.state_dict()["up.weight"].clone()
        with gathered(model.up.parameters(), modifier_rank=1):
            nn.init.constant_(model.up.weight, float(rank + 1))
        return read, kept, model.state_dict()["up.weight"]

    expected = tricky().up.weight
    for read, kept, written in run_ranks(2, fn):
        assert torch.equal(read, expected)
        assert torch.equal(kept, expected)
        assert torch.equal(written, torch.full_like(written, 2.0))


def test_gathered_says_that_an_attribute_is_the_weight_itself() -> None:
    def fn(rank):
        model = tricky()
        torchloom.shard_model(model, persistence_threshold=20)
        told = []
        for target in (model.up.weight, [model.up.weight]):
            with pytest.raises(ShardError) as error, gathered(target):
                pass
            told.append(str(error.value))
        return told

    for told in run_ranks(2, fn):
        assert all("given a plain tensor" in each for each in told)


def test_unshard_gives_the_model_back() -> None:
    def fn(rank):
        model = tricky()
        torchloom.shard_model(model, persistence_threshold=20)
        unshard(model)
        assert type(model.up) is nn.Linear
        return pickle.loads(pickle.dumps(model.state_dict())), model(tokens(0, 0)).item()

    expected = tricky()
    for state, loss in run_ranks(2, fn):
        assert all(torch.equal(value, expected.state_dict()[key]) for key, value in state.items())
        assert loss == expected(tokens(0, 0)).item()


def test_meta_model_is_never_whole() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])

        def forward(self, x):
            return self.layers(x).square().mean()

    def fn(rank):
        with on_meta():
            model = Wide()
        most = 0

        def init(module):
            nonlocal most
            alive = sum(local_shard(p).numel() for p in model.parameters() if not p.is_meta)
            most = max(most, alive)
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

        torch.manual_seed(rank)
        torchloom.shard_model(model, persistence_threshold=100, init=init)
        loss = model(torch.ones(2, 32))
        loss.backward()
        return most, loss.item(), sum(local_shard(p).numel() for p in model.parameters())

    results = run_ranks(2, fn)
    whole = 6 * (32 * 32 + 32)
    for most, loss, held in results:
        assert most < whole
        assert held < 0.6 * whole
        assert loss == results[0][1]  # rank 0's weights on every rank


def test_meta_module_without_init() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

    with on_meta():
        model = Bare()
    with pytest.raises(ShardError, match="reset_parameters"):
        shard_module(model, plan(model))


def test_a_modules_own_state_dict_code_still_runs() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "extra"] = torch.tensor(7)

        def _load_from_state_dict(self, state_dict, prefix, *args):
            state_dict.pop(prefix + "extra", None)
            super()._load_from_state_dict(state_dict, prefix, *args)

    def fn(rank):
        model = Renamed()
        torchloom.shard_model(model, persistence_threshold=10)
        state = model.state_dict()
        model.load_state_dict({"weight": torch.arange(64.0)}, strict=True)
        return sorted(state), model.state_dict()["weight"]

    for names, weight in run_ranks(2, fn):
        assert names == ["extra", "weight"]
        assert torch.equal(weight, torch.arange(64.0))


@pytest.mark.parametrize(
    ("numels", "found"),
    [
        ([4096, 64], 64),  # the bias is more than a hundredth
        ([20_000_000, 99_999, 100_000], 100_000),  # DeepSpeed's
        ([0, 0], 100_000),
        ([], 100_000),
    ],
)
def test_what_stays_whole_by_default_is_a_hundredth_of_the_model(
    numels: list[int], found: int
) -> None:
    threshold = default_threshold(numels)
    assert threshold == found
    assert 100 * sum(each for each in numels if each < threshold) <= sum(numels)
