"""Mistakes: each has its own error, on every rank, at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
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


def test_arguments_of_a_launcher_name_a_config() -> None:
    """Under DeepSpeed's name or its older one; without either the run would have no settings."""
    with pytest.raises(ConfigError, match="has no deepspeed_config, and config= is not given"):
        torchloom.initialize(args=SimpleNamespace(local_rank=0), model=tricky())
    for name in ("deepspeed_config", "deepscale_config"):
        with pytest.raises(ConfigError, match="stage"):
            document = {"zero_optimization": {"stage": 4}}
            torchloom.initialize(args=SimpleNamespace(**{name: document}), model=tricky())


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


def test_graphs_that_differ_between_ranks_run_where_their_collectives_agree() -> None:
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
        loss = engine(torch.ones(2, 8))
        engine.backward(loss)
        engine.step()
        return loss.item()

    assert run_ranks(2, fn) == [128.0, 144.0]


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
        return error_of(lambda: engine.no_sync().__enter__())

    expect(both(fn), EngineError, "no_sync()", "gradient_accumulation_steps")


def test_ranks_with_different_optimizers() -> None:
    def fn(rank, made):
        def run():
            model = tricky()
            torchloom.initialize(
                model=model,
                optimizer=made(rank, model),
                config={**settings(), "optimizer": None},
            )

        return error_of(run)

    def kinds(rank, model):
        return (torch.optim.SGD if rank else torch.optim.Adam)(model.parameters(), lr=0.1)

    def rates(rank, model):
        return torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))

    def groups(rank, model):
        params = list(model.parameters())
        return torch.optim.SGD(
            [{"params": params[: 2 + rank]}, {"params": params[2 + rank :]}], lr=0.1
        )

    for made, words in ((kinds, "kind"), (rates, "group 0 lr"), (groups, "group 0 parameters")):
        expect(both(fn, made), AgreementError, "the optimizer", words, "ranks [0]", "ranks [1]")


def test_ranks_with_different_schedules() -> None:
    def fn(rank):
        def schedule(optimizer):
            return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3 + rank)

        return error_of(
            lambda: torchloom.initialize(model=tricky(), lr_scheduler=schedule, config=settings())
        )

    expect(both(fn), AgreementError, "the schedule", "step_size", "3", "4")
