"""Mistakes: each has its own error, on every rank, at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchloom
from support.models import tokens, tricky
from support.ranks import run_ranks
from support.runs import make_engine, settings, train
from torchloom.errors import (
    AgreementError,
    CheckpointError,
    ConfigError,
    EngineError,
    PassOrderError,
    ShardError,
)


def error_of(action) -> tuple[str, str]:
    """Return the type and text of what an action raises."""
    try:
        action()
    except torchloom.TorchloomError as error:
        return type(error).__name__, str(error)
    return "none", ""


def both(fn, *args) -> tuple[str, str]:
    """Run on two ranks; they must fail alike."""
    first, second = run_ranks(2, fn, *args, timeout_s=60)
    assert first[0] == second[0], (first, second)
    return first


def expect(found: tuple[str, str], kind: type[Exception], *words: str) -> None:
    assert found[0] == kind.__name__, found
    for word in words:
        assert word in found[1], found[1]


def test_no_model() -> None:
    with pytest.raises(ConfigError, match="model="):
        torchloom.initialize(config={})


def test_config_errors_come_before_any_process_group() -> None:
    with pytest.raises(ConfigError, match="stage"):
        torchloom.initialize(model=tricky(), config={"zero_optimization": {"stage": 4}})
    assert not torch.distributed.is_initialized()


def test_config_given_twice() -> None:
    with pytest.raises(ConfigError, match="config and config_params"):
        torchloom.initialize(model=tricky(), config={}, config_params={})


def test_already_sharded() -> None:
    def fn(rank):
        _, model = make_engine()
        return error_of(lambda: torchloom.initialize(model=model, config=settings()))

    expect(both(fn), ShardError, "already sharded", "unshard")


def test_foreign_optimizer() -> None:
    def fn(rank):
        stranger = torch.optim.SGD(nn.Linear(3, 3).parameters(), 0.1)
        return error_of(
            lambda: torchloom.initialize(model=tricky(), optimizer=stranger, config=settings())
        )

    expect(both(fn), EngineError, "group 0", "(3, 3)", "model.parameters()")


def test_parameter_added_after_initialize() -> None:
    def fn(rank):
        engine, model = make_engine()
        model.late = nn.Parameter(torch.ones(3))
        return error_of(lambda: train(engine, rank, 1))

    expect(both(fn), ShardError, "added: late", "before torchloom.initialize")


def test_loss_is_no_scalar() -> None:
    def fn(rank):
        engine, _model = make_engine()
        vector = engine(tokens(0, rank)) * torch.ones(2)
        return error_of(lambda: engine.backward(vector))

    expect(both(fn), EngineError, "(2,)", "loss.mean()")


def test_loss_without_graph() -> None:
    def fn(rank):
        engine, _ = make_engine()
        return error_of(lambda: engine.backward(torch.tensor(1.0)))

    expect(both(fn), EngineError, "does not depend")


def test_step_without_backward() -> None:
    def fn(rank):
        engine, _ = make_engine()
        return error_of(engine.step)

    expect(both(fn), EngineError, "without backward()")


def test_step_without_optimizer() -> None:
    def fn(rank):
        config = settings()
        del config["optimizer"]
        engine, *_ = torchloom.initialize(model=tricky(), config=config)
        return error_of(lambda: train(engine, rank, 1))

    expect(both(fn), EngineError, "optimizer=")


def test_compiled_twice() -> None:
    def fn(rank):
        engine, _ = make_engine()
        engine.compile(backend="aot_eager")
        return error_of(engine.compile)

    expect(both(fn), EngineError, "compiled already")


def test_unknown_pass() -> None:
    def fn(rank):
        engine, _ = make_engine()
        return error_of(lambda: engine.compile(passes=["zero3", "plce"]))

    expect(both(fn), PassOrderError, "plce", "did you mean 'place'")


def test_ranks_with_different_configs() -> None:
    def fn(rank):
        return error_of(lambda: make_engine(gradient_clipping=float(rank)))

    expect(both(fn), AgreementError, "ranks [0]", "ranks [1]", "the config")


def test_ranks_with_different_models() -> None:
    def fn(rank):
        model = nn.Linear(8 + rank, 8)
        return error_of(lambda: torchloom.initialize(model=model, config=settings()))

    expect(both(fn), AgreementError, "the model's parameters")


def test_ranks_that_capture_different_graphs() -> None:
    class Forked(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))
            self.extra = rank

        def forward(self, x):
            return ((x @ self.weight) + self.extra).sum()

    def fn(rank):
        engine, *_ = torchloom.initialize(model=Forked(rank), config=settings())
        engine.compile(backend="aot_eager")
        try:
            engine(torch.ones(2, 8))
        except Exception as error:  # noqa: BLE001  Dynamo wraps what a backend raises
            return "AgreementError" if "do not agree" in str(error) else repr(error), str(error)
        return "none", ""

    expect(both(fn), AgreementError, "captured graph0")


def test_no_checkpoint(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine()
        return error_of(lambda: engine.load_checkpoint(tmp_path))

    expect(both(fn), CheckpointError, "no checkpoint in", "latest")


def test_checkpoint_of_another_model(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine()
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path)
        other, *_ = torchloom.initialize(model=nn.Linear(12, 17), config=settings())
        return error_of(lambda: other.load_checkpoint(tmp_path))

    expect(both(fn), CheckpointError, "another model", "weight: not in the checkpoint")


def test_no_sync_where_gradients_are_sharded() -> None:
    def fn(rank):
        engine, _ = make_engine()
        return error_of(engine.no_sync().__enter__)

    expect(both(fn), EngineError, "no_sync()", "gradient_accumulation_steps")
