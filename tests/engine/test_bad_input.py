"""Mistakes: each has its own error, on every rank, at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from support.runs import make_engine, micro_step, settings, train
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
        return micro_step(engine, torch.ones(2, 8))

    assert run_ranks(2, fn) == [128.0, 144.0]


def with_late_parameter(rank):
    engine, model = make_engine()
    model.late = nn.Parameter(torch.ones(3))
    train(engine, rank, 1)


def with_stranger(rank):
    stranger = torch.optim.SGD(nn.Linear(3, 3).parameters(), 0.1)
    torchloom.initialize(model=tricky(), optimizer=stranger, config=settings())


def without_optimizer(rank):
    engine, *_ = torchloom.initialize(model=tricky(), config=settings(optimizer=None))
    train(engine, rank, 1)


def compiled_twice(rank):
    engine = make_engine()[0]
    engine.compile(backend="aot_eager")
    engine.compile()


def vector_loss(rank):
    engine = make_engine()[0]
    engine.backward(engine(tokens(0, rank)) * torch.ones(2))


def of_another_model(rank, folder):
    engine = make_engine()[0]
    train(engine, rank, 1)
    engine.save_checkpoint(folder)
    other, *_ = torchloom.initialize(model=nn.Linear(12, 17), config=settings())
    other.load_checkpoint(folder)


def with_optimizer(make):
    def run(rank):
        model = tricky()
        config = settings(optimizer=None)
        torchloom.initialize(
            model=model, optimizer=make(rank, list(model.parameters())), config=config
        )

    return run


def in_groups(rank, params):
    groups = [{"params": params[: 2 + rank]}, {"params": params[2 + rank :]}]
    return torch.optim.SGD(groups, lr=0.1)


def with_schedule(rank):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3 + rank)

    torchloom.initialize(model=tricky(), lr_scheduler=schedule, config=settings())


MISTAKES = [
    (
        lambda rank: torchloom.initialize(model=make_engine()[1], config=settings()),
        *(ShardError, "already sharded", "unshard"),
    ),
    (with_stranger, EngineError, "group 0", "(3, 3)", "model.parameters()"),
    (with_late_parameter, ShardError, "added: late", "before torchloom.initialize"),
    (vector_loss, EngineError, "(2,)", "loss.mean()"),
    (
        lambda rank: make_engine()[0].backward(torch.tensor(1.0)),
        *(EngineError, "does not depend"),
    ),
    (lambda rank: make_engine()[0].step(), EngineError, "without backward()"),
    (without_optimizer, EngineError, "optimizer="),
    (compiled_twice, EngineError, "compiled already"),
    (
        lambda rank: make_engine()[0].compile(passes=["zero3", "plce"]),
        *(PassOrderError, "plce", "did you mean 'place'"),
    ),
    (
        lambda rank: make_engine()[0].no_sync().__enter__(),
        *(EngineError, "no_sync()", "gradient_accumulation_steps"),
    ),
]
UNLIKE_RANKS = [
    (lambda rank: make_engine(gradient_clipping=float(rank)), "the config"),
    (
        lambda rank: torchloom.initialize(model=nn.Linear(8 + rank, 8), config=settings()),
        "the model's parameters",
    ),
    (
        with_optimizer(
            lambda rank, params: (torch.optim.SGD if rank else torch.optim.Adam)(params, lr=0.1)
        ),
        *("the optimizer", "kind"),
    ),
    (
        with_optimizer(lambda rank, params: torch.optim.SGD(params, lr=0.1 * (rank + 1))),
        *("the optimizer", "group 0 lr"),
    ),
    (with_optimizer(in_groups), "the optimizer", "group 0 parameters"),
    (with_schedule, "the schedule", "step_size", "3", "4"),
]


def test_each_mistake_has_its_error_on_every_rank(tmp_path) -> None:
    in_folder = [
        (
            lambda rank: make_engine()[0].load_checkpoint(tmp_path / "none"),
            *(CheckpointError, "no checkpoint in", "latest"),
        ),
        (
            lambda rank: of_another_model(rank, tmp_path),
            *(CheckpointError, "another model", "weight: not in the checkpoint"),
        ),
    ]
    unlike = [(act, AgreementError, "ranks [0]", "ranks [1]", *w) for act, *w in UNLIKE_RANKS]
    mistakes = [*MISTAKES, *in_folder, *unlike]

    def fn(rank):
        return [error_of(lambda act=act: act(rank)) for act, *_ in mistakes]

    for found in run_ranks(2, fn, timeout_s=300):
        for (name, text), (_, kind, *words) in zip(found, mistakes, strict=True):
            assert name == kind.__name__, text
            assert all(word in text for word in words), text
