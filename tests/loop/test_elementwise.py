"""Which optimizers may step shards, and which are right on no part of a model's parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import torchloom
from support.models import tokens, tricky
from support.optimizers import Base
from support.pool import run_ranks
from support.runs import assert_equal, settings, train, weights
from torchloom.errors import ConfigError, TorchloomError


class Closure(Base):
    def step(self, closure):
        closure()
        super().step()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


def outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except TorchloomError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def attempt(stage: int, make: Callable[[Any], Optimizer], how: str) -> str:
    model = tricky()
    config = settings(stage)
    del config["optimizer"]
    given = make(trained(model)) if how == "instance" else make
    rest = {"model_parameters": trained(model)} if how == "function" else {}
    return outcome(
        lambda: torchloom.initialize(model=model, optimizer=given, config=config, **rest)
    )


@pytest.mark.parametrize("make", [torch.optim.LBFGS, Closure])
def test_closures_at_every_stage(make: Callable[[Any], Optimizer]) -> None:
    def fn(rank):
        return [attempt(s, make, how) for s in (0, 3) for how in ("instance", "function")]

    for found in run_ranks(2, fn):
        for text in found:
            assert text.startswith(f"EngineError: {make.__name__} evaluates the loss anew")


@pytest.mark.parametrize("kind", ["LBFGS", "Adafactor", "Lamb"])
def test_config_section(kind: str) -> None:
    with pytest.raises(ConfigError, match=f'"{kind}" is not built here'):
        torchloom.initialize(model=tricky(), config=settings(optimizer={"type": kind}))


class Prodigy(Base):
    """One step size of all parameters, as its package's class of this name computes."""


class DAdaptLion(Base):
    elementwise = True


class ClipsInside(Base):
    pass


def test_what_joins_numbers_of_all_parameters_is_refused_by_name() -> None:
    """Also where it is declared elementwise, and not where each rank steps all parameters."""
    clips = functools.partial(ClipsInside, max_grad_norm=1.0)

    def fn(rank):
        found = {}
        for stage in (0, 1, 3):
            for name, make in {"Prodigy": Prodigy, "clips": clips, "declared": DAdaptLion}.items():
                model = torchloom.shard_model(tricky(), stage, persistence_threshold=20)
                optimizer = make(trained(model))
                model(tokens(0, rank)).backward()
                before = weights(model)
                try:
                    found[name, stage] = outcome(optimizer.step)
                except NotImplementedError:
                    found[name, stage] = "none"
                assert_equal(weights(model), before)
            found["engine", stage] = attempt(stage, Prodigy, "instance")
        model = torchloom.shard_model(tricky(), 3, persistence_threshold=20)
        lbfgs = torch.optim.LBFGS(trained(model))
        return found, outcome(lambda: lbfgs.step(lambda: torch.zeros(())))

    for found, lbfgs in run_ranks(2, fn):
        assert lbfgs.startswith("EngineError: LBFGS cannot step parameters that ranks divide")
        for (name, stage), text in found.items():
            if stage == 0:
                assert text == "none", (name, text)
            else:
                assert text.startswith("EngineError: "), (name, stage, text)
                assert "max_grad_norm" in text if name == "clips" else "one step size" in text


def test_a_given_optimizer_and_values_for_auto_take_the_places_in_the_config() -> None:
    document = {
        **settings(),
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "Unheard", "params": {"lr": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": "auto", "warmup_num_steps": 1},
        },
    }

    def fn(rank: int):
        model = tricky()
        with pytest.raises(ConfigError, match="Unheard"):
            torchloom.initialize(model=tricky(), config=document)
        given = torch.optim.AdamW(model.parameters(), lr=0.02)
        engine, optimizer, _, schedule = torchloom.initialize(
            model=model,
            optimizer=given,
            config=document,
            auto={"train_micro_batch_size_per_gpu": 3},
        )
        schedule_of = {"warmup_max_lr": 0.02, "warmup_num_steps": 1}
        other = tricky()
        plain = {**settings(), "scheduler": {"type": "WarmupLR", "params": schedule_of}}
        plain.pop("optimizer")
        reference, *_ = torchloom.initialize(
            model=other, optimizer=torch.optim.AdamW(other.parameters(), lr=0.02), config=plain
        )
        same = train(engine, rank, 3) == train(reference, rank, 3)
        rate, micro = schedule.get_last_lr()[0], engine.train_micro_batch_size_per_gpu()
        return optimizer is given, rate, micro, same

    for is_given, rate, micro, same in run_ranks(2, fn):
        assert (is_given, rate, micro, same) == (True, pytest.approx(0.02), 3, True)


class EarlyStates(torch.optim.Adagrad):
    """Makes states when it is made, and is no class of torch's."""

    elementwise = True


@pytest.mark.parametrize("stage", [0, 1])
def test_a_function_is_given_a_list_of_parameters_that_it_may_group(stage: int) -> None:
    """As DeepSpeed's: by default all trainable parameters, else what model_parameters= holds."""

    def by_dim(kind):
        def make(params):
            assert all(isinstance(each, nn.Parameter) for each in params)
            large = [each for each in params if each.dim() >= 2]
            few = [each for each in params if each.dim() < 2]
            groups = [{"params": large, "weight_decay": 0.1}, {"params": few, "weight_decay": 0.0}]
            return kind(groups, lr=1e-2)

        return make

    def fn(rank):
        for kind in (torch.optim.AdamW, torch.optim.Adagrad, EarlyStates):
            model = tricky()
            config = settings(stage)
            del config["optimizer"]

            def run(kind=kind, model=model, config=config):
                engine = torchloom.initialize(model=model, optimizer=by_dim(kind), config=config)[0]
                assert len(engine.optimizer.param_groups[0]["params"]) > 1
                train(engine, rank, 1)

            assert outcome(run) == "none"
        model, seen = tricky(), []

        def make(given):
            seen.extend(given)
            return torch.optim.AdamW(given)

        group = {"params": list(model.parameters())[:2], "lr": 0.5}
        config = {**settings(stage), "optimizer": {"type": "SGD", "params": {"lr": 1}}}
        torchloom.initialize(model=model, optimizer=make, model_parameters=[group], config=config)
        assert {each["lr"] for each in seen} == {0.5}

    run_ranks(2, fn)
