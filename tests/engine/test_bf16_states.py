"""Shards, gradients and optimizer states in bf16, by DeepSpeed's keys."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchloom
from support.pool import run_ranks
from torchloom.config import load_config
from torchloom.errors import ConfigError
from torchloom.shard import full_state_dict, local_shard

KEYS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def settings(stage: int, **bf16) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True, **bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        "steps_per_print": float("inf"),
    }


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(13, 31), nn.GELU(), nn.Linear(31, 7))


def batch_of(rank: int, index: int):
    return torch.randn(3, 13, generator=torch.Generator().manual_seed(10 * index + rank))


def in_one_process(num_steps: int) -> dict[str, torch.Tensor]:
    model = build().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        for index in (2 * step, 2 * step + 1):
            for rank in range(2):
                (model(batch_of(rank, index).bfloat16()).float().square().mean() / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_that_of_a_bf16_model_and_goes_on_from_its_file(stage: int, tmp_path) -> None:
    def fn(rank, folder):
        def train(engine, steps) -> None:
            for index in (i for step in steps for i in (2 * step, 2 * step + 1)):
                engine.backward(engine(batch_of(rank, index)).float().square().mean())
                engine.step()

        engine, optimizer, *_ = torchloom.initialize(model=build(), config=settings(stage, **KEYS))
        engine.compile(backend="aot_eager")
        train(engine, range(4))
        dtypes = {local_shard(param).dtype for param in engine.module.parameters()}
        dtypes |= {
            value.dtype
            for state in optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        }
        engine.save_checkpoint(folder, tag="four")
        train(engine, range(4, 6))
        weights = full_state_dict(engine.module)

        again, *_ = torchloom.initialize(model=build(), config=settings(stage, **KEYS))
        again.load_checkpoint(folder, tag="four")
        again.compile(backend="aot_eager")
        train(again, range(4, 6))
        same = full_state_dict(again.module)
        return dtypes, weights, all(torch.equal(each, same[name]) for name, each in weights.items())

    expected = in_one_process(6)
    for dtypes, weights, goes_on in run_ranks(2, fn, str(tmp_path)):
        assert dtypes == {torch.bfloat16}
        assert goes_on
        for name, each in weights.items():
            # A rounding of a weight of 0.3 is 1e-3; six steps of 1e-2 move it by up to 6e-2.
            torch.testing.assert_close(each, expected[name], atol=4e-3, rtol=0)
            assert (each - build().state_dict()[name].bfloat16()).abs().max() > 2e-2


@pytest.mark.parametrize(
    ("stage", "bf16", "words"),
    [
        (3, {"bf16_master_weights_and_grads": True}, "set bf16.bf16_optimizer_states to true"),
        (3, {"bf16_optimizer_states": True}, "set bf16.bf16_master_weights_and_grads to true"),
        (3, {**KEYS, "enabled": False}, "set bf16.enabled to true"),
    ],
)
def test_what_the_keys_need(stage: int, bf16: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(settings(stage, **bf16), world_size=2)
