"""A small engine run, as most engine tests need one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torchloom
from support.models import Tricky, tokens, tricky
from torchloom.engine import Engine


def settings(stage: int = 3, **rest: Any) -> dict[str, Any]:
    """Return a config whose stage really shards the small model."""
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "fused": False}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "steps_per_print": float("inf"),
        **rest,
    }


def make_engine(stage: int = 3, seed: int = 0, **rest: Any) -> tuple[Engine, Tricky]:
    """Return an engine over the tricky model, and the model."""
    model = tricky(seed)
    engine, *_ = torchloom.initialize(model=model, config=settings(stage, **rest))
    return engine, model


def train(engine: Engine, rank: int, steps: int, first: int = 0) -> list[float]:
    """Take optimizer steps on reproducible batches; return the losses."""
    losses = []
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(tokens(10 * step + micro, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a model's state."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Compare two states bit by bit."""
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name
