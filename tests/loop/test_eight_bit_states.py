"""Optimizers that quantize their states by blocks see parameters whole, and train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.pool import run_ranks
from support.runs import sharded
from torchloom.shard import full_state_dict


def build() -> nn.Module:
    torch.manual_seed(0)
    # torchao quantizes only what divides into blocks of 256: 64 x 96, not 65 x 96.
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 65), nn.Linear(65, 64))


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def optimizer_of(package: str, params: Any) -> torch.optim.Optimizer:
    if package == "bitsandbytes":
        return pytest.importorskip("bitsandbytes").optim.AdamW8bit(params, lr=1e-2)
    return pytest.importorskip("torchao.optim").AdamW8bit(params, lr=1e-2)


def in_one_process(package: str, steps: int) -> dict[str, Tensor]:
    model = build()
    optimizer = optimizer_of(package, model.parameters())
    for step in range(steps):
        for rank in range(2):
            (model(batch_of(step, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_weights_are_those_of_one_process(package: str, tmp_path) -> None:
    pytest.importorskip(package)

    def fn(rank: int, folder: str) -> list[dict[str, Tensor]]:
        def start(stage: int) -> Any:
            make = lambda params: optimizer_of(package, params)  # noqa: E731
            return sharded(build(), stage, batch=4, optimizer=make)

        def train(engine: Any, steps: range) -> None:
            for step in steps:
                engine.backward(engine(batch_of(step, rank)).square().mean())
                engine.step()

        engine = start(2)
        train(engine, range(3))
        engine.save_checkpoint(folder, tag="three")
        other = start(3)
        other.load_checkpoint(folder, tag="three")
        for each in (engine, other):
            train(each, range(3, 5))
        return [full_state_dict(engine.module), full_state_dict(other.module)]

    expected = in_one_process(package, 5)
    for found in run_ranks(2, fn, str(tmp_path), timeout_s=300):
        for weights in found:
            for name, each in weights.items():
                # One code of a state that rounds otherwise moves a weight by a part of the rate.
                torch.testing.assert_close(each, expected[name], atol=1e-4, rtol=0)
