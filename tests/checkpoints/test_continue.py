"""Checkpoints: exact continuation, other numbers of ranks, other stages, export."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from support.models import tokens, tricky
from support.pool import run_ranks
from support.runs import assert_equal, make_engine, train, weights

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_continues_bitwise(stage: int, tmp_path) -> None:
    def through(rank):
        engine, model = make_engine(stage, scheduler=SCHEDULE)
        losses = train(engine, rank, 6)
        return losses, weights(model)

    def first_half(rank):
        engine, _ = make_engine(stage, scheduler=SCHEDULE)
        losses = train(engine, rank, 3)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 7})
        return losses

    def second_half(rank):
        engine, model = make_engine(stage, seed=5, scheduler=SCHEDULE)
        path, client = engine.load_checkpoint(tmp_path)
        assert client == {"epoch": 7}
        assert engine.global_steps == 3
        return train(engine, rank, 3, first=3), weights(model), path

    whole = run_ranks(2, through)
    start, end = run_ranks(2, first_half), run_ranks(2, second_half)
    for rank in range(2):
        assert whole[rank][0] == start[rank] + end[rank][0]
        assert_equal(whole[rank][1], end[rank][1])
    assert end[0][2].endswith("global_step3")


WORLDS = [
    ((3, 2), (3, 1)),
    ((3, 1), (3, 2)),
    ((3, 4), (1, 2)),
    ((1, 2), (2, 4)),
    ((3, 4, 2), (3, 2)),
]
"""Stages and ranks that save and that load, and how many ranks share weights in hybrid sharding."""


@pytest.mark.parametrize(("before", "after"), WORLDS)
def test_other_world_size_and_stage(before, after, tmp_path) -> None:
    stage, num_ranks, *shard_size = before

    def save(rank):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 20}
        if shard_size:
            zero["shard_size"] = shard_size[0]
        engine, model = make_engine(stage, zero_optimization=zero)
        train(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        return weights(model), optimizer_state(engine)

    def load(rank):
        engine, model = make_engine(after[0], seed=9)
        engine.load_checkpoint(tmp_path)
        found = weights(model), optimizer_state(engine)
        train(engine, rank, 1)
        return found

    saved, loaded = run_ranks(num_ranks, save)[0], run_ranks(after[1], load)[0]
    assert_equal(saved[0], loaded[0])
    assert_equal(saved[1], loaded[1])


def optimizer_state(engine) -> dict[str, torch.Tensor]:
    """Gather the optimizer's states to whole flat tensors."""
    comm = engine.world.comm
    found = {}
    for each in engine.local:
        for key, value in engine.optimizer.state[each.param].items():
            if value.dim() and each.is_divided:
                full = value.new_empty(value.numel() * comm.world_size)
                comm.gather_into([value], [full], ["w"])
                value = full[: each.spec.numel]
            found[f"{each.spec.name}.{key}"] = value.flatten().clone()
    return found


def test_16bit_export_loads_into_the_plain_model(tmp_path) -> None:
    def save(rank):
        engine, model = make_engine()
        train(engine, rank, 2)
        engine.save_16bit_model(tmp_path)
        return weights(model)

    trained = run_ranks(2, save)[0]
    exported = load_file(tmp_path / "model.safetensors")
    assert "head.weight" not in exported  # tied to embed.weight
    plain = tricky(3)
    missing, unexpected = plain.load_state_dict(exported, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    for name, value in exported.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, trained[name].to(torch.bfloat16)), name
    assert plain(tokens(0, 0)).isfinite()
