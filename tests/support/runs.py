"""A small engine run, as most engine tests need one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import torchloom
from support.models import Tricky, tokens, tricky
from torchloom.engine import Engine

SGD = {"type": "SGD", "params": {"lr": 0.1}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


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


def sharded(
    model: nn.Module,
    stage: int = 3,
    *,
    optimizer: Any = None,
    backend: str | Callable[..., Any] | None = None,
    batch: int = 3,
    threshold: int = 0,
    zero: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Engine:
    """Return an engine that cuts every weight of `model`, small ones as well.

    Args:
        optimizer: a section of the config, or what `initialize` takes.
        backend: what to compile with; None for eager.
        batch: rows of a micro-step.
        threshold: elements below which weights stay whole.
        zero: more of the section `zero_optimization`.
        sections: the rest of the config.
    """
    cut = {"stage": stage, "stage3_param_persistence_threshold": threshold, **(zero or {})}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": cut,
        "steps_per_print": float("inf"),
        **sections,
    }
    if isinstance(optimizer, dict):
        config["optimizer"], optimizer = optimizer, None
    engine, *_ = torchloom.initialize(model=model, config=config, optimizer=optimizer)
    if backend:
        engine.compile(backend=backend)
    return engine


def micro_step(engine: Engine, *batch: Any) -> float:
    """Take one micro-step with a model that returns its loss; return the loss."""
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return loss.item()


def hears(name: str = "torchloom", level: int = logging.WARNING) -> list[str]:
    """Return a list that takes what is logged under a name from now on."""
    heard: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    return heard
