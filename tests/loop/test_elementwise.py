"""Optimizers that look beyond single elements are refused where parameters are in pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from support.runs import assert_equal, settings, train, weights
from torchloom.errors import ConfigError, TorchloomError


class Base(Optimizer):
    """An optimizer of somebody else's, with the update of one parameter to fill in."""

    def __init__(self, params: Any, lr: float = 1e-2, **rest: Any) -> None:
        super().__init__(params, {"lr": lr, **rest})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group, self.state[param])

    def update(self, param: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Base):
    def update(self, param, group, state):
        average = state.setdefault("average", torch.zeros_like(param))
        param.add_((0.9 * average + 0.1 * param.grad).sign(), alpha=-group["lr"])
        average.lerp_(param.grad, 0.01)


class Lookahead(Optimizer):
    """Wraps another optimizer, and pulls weights back every five steps."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.count = base, 0
        self.base.param_groups = self.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.clone())
                if self.count % 5 == 0:
                    slow.lerp_(param, 0.5)
                    param.copy_(slow)


class Lamb(Base):
    def update(self, param, group, state):
        trust = param.norm() / param.grad.norm()
        param.add_(param.grad, alpha=-group["lr"] * float(trust.clamp(max=10)))


class GlobalNorm(Base):
    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.factor = 1 / (1 + float(torch.stack([g.norm() for g in grads]).norm()))
        super().step()

    def update(self, param, group, state):
        param.add_(param.grad, alpha=-group["lr"] * self.factor)


class NoDecayOnVectors(Base):
    def update(self, param, group, state):
        decay = 0.0 if param.dim() < 2 else 0.1
        param.add_(param.grad + decay * param, alpha=-group["lr"])


class Blocks:
    """A state in blocks, with one scale for each."""

    def __init__(self, numel: int) -> None:
        self.codes = torch.zeros(numel, dtype=torch.uint8)
        self.scales = torch.ones(numel // 256)


class QuantizedStates(Base):
    """As 8-bit optimizers: states of at least 4096 elements are quantized in blocks."""

    def update(self, param, group, state):
        if "average" not in state:
            large = param.numel() >= 4096 and param.numel() % 256 == 0
            state["average"] = Blocks(param.numel()) if large else torch.zeros_like(param)
        param.add_(param.grad, alpha=-group["lr"])


class FactoredLarge(Base):
    """As big vision's Adafactor: the second moment of large matrices is factored."""

    def update(self, param, group, state):
        square = param.grad.square()
        if param.dim() > 1 and min(param.shape) >= 128:
            square = square.mean(0, keepdim=True) * square.mean(1, keepdim=True) / square.mean()
        param.add_(param.grad / (square.sqrt() + 1e-8), alpha=-group["lr"])


class Closure(Base):
    def step(self, closure):
        closure()
        super().step()


class OwnStep(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class Still(Base):
    def update(self, param, group, state):
        pass


ALLOWED: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "Lion": Lion,
    "Lookahead": lambda p: Lookahead(torch.optim.AdamW(p, 1e-2)),
}
REFUSED: dict[str, Callable[[Any], Optimizer]] = {
    "Adafactor": torch.optim.Adafactor,
    "Lamb": Lamb,
    "GlobalNorm": GlobalNorm,
    "NoDecayOnVectors": NoDecayOnVectors,
    "Still": Still,
}


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


def test_engines_refuse_and_take_what_a_trial_says() -> None:
    """Every kind is tried in a loop of one's own, below."""
    kinds = {
        name: (REFUSED | ALLOWED)[name] for name in ("Lamb", "GlobalNorm", "Lion", "Lookahead")
    }

    def fn(rank):
        return {
            (name, stage): attempt(stage, make, how)
            for name, make in kinds.items()
            for stage, how in ((0, "instance"), (1, "instance"), (1, "function"), (3, "function"))
        }

    for found in run_ranks(2, fn):
        for (name, stage), text in found.items():
            if stage == 0 or name in ALLOWED:
                assert text == "none", (name, stage)
            else:
                assert text.startswith(f"EngineError: {name} cannot step shards"), text
                assert "'embed.weight'" in text
                assert "\n" not in text


def test_an_optimizer_of_whole_parameters_alone() -> None:
    """Small parameters stay whole: what steps just them may look at all of them."""

    def fn(rank):
        model, config = tricky(), settings(3)
        del config["optimizer"]
        optimizer = torch.optim.Adafactor([model.up.bias, model.down.bias])
        engine, *_ = torchloom.initialize(model=model, optimizer=optimizer, config=config)
        train(engine, rank, 2)
        return engine.was_step_applied()

    assert run_ranks(2, fn) == [True, True]


@pytest.mark.parametrize("how", ["instance", "function"])
def test_muon(how: str) -> None:
    def fn(rank):
        found = []
        for stage in (0, 1, 2, 3):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
            config = settings(stage)
            del config["optimizer"]
            make = torch.optim.Muon
            given = make(model.parameters()) if how == "instance" else make
            found.append(
                outcome(
                    lambda model=model, given=given, config=config: torchloom.initialize(
                        model=model, optimizer=given, config=config
                    )
                )
            )
        return found

    for whole, *rest in run_ranks(2, fn):
        assert whole == "none"
        for text in rest:
            assert text.startswith("EngineError: ")
            assert "Muon" in text
            assert "stage 0" in text


@pytest.mark.parametrize("make", [torch.optim.LBFGS, Closure])
def test_closures_at_every_stage(make: Callable[[Any], Optimizer]) -> None:
    def fn(rank):
        return [attempt(s, make, how) for s in (0, 3) for how in ("instance", "function")]

    for found in run_ranks(2, fn):
        for text in found:
            assert text.startswith(f"EngineError: {make.__name__} evaluates the loss anew")


@pytest.mark.parametrize("kind", ["LBFGS", "Muon", "Adafactor", "Lamb"])
def test_config_section(kind: str) -> None:
    with pytest.raises(ConfigError, match=f'"{kind}" is not built here'):
        torchloom.initialize(model=tricky(), config=settings(optimizer={"type": kind}))


@pytest.mark.parametrize("stage", [0, 3])
def test_own_loop(stage: int) -> None:
    def fn(rank):
        found = {}
        for name, make in (REFUSED | ALLOWED).items():
            model = torchloom.shard_model(tricky(), stage, persistence_threshold=20)
            optimizer = make(trained(model))
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1) if name == "Lion" else None
            model(tokens(0, rank)).backward()
            before = weights(model)
            try:
                found[name] = outcome(optimizer.step)
            except RuntimeError as error:
                found[name] = str(error)
            if found[name] != "none":
                assert_equal(weights(model), before)
            if schedule is not None:
                schedule.step()
                optimizer.step()
        model = torchloom.shard_model(tricky(), stage, persistence_threshold=20)
        lbfgs = torch.optim.LBFGS(trained(model))
        found["LBFGS"] = outcome(lambda: lbfgs.step(lambda: torch.zeros(())))
        return found

    for found in run_ranks(2, fn):
        for name in ALLOWED:
            assert found[name] == "none"
        for name in (*REFUSED, "LBFGS"):
            if stage:
                assert found[name].startswith(f"EngineError: {name} cannot step shards"), found[
                    name
                ]
            else:
                assert found[name] in ("none", "this optimizer needs a friend")


def test_the_trial_leaves_everything_as_it_was() -> None:
    def fn(rank):
        model = torchloom.shard_model(tricky(), 3, persistence_threshold=20)
        optimizer = Lookahead(torch.optim.AdamW(trained(model), 1e-2))
        model(tokens(0, rank)).backward()
        before, random = weights(model), torch.get_rng_state()
        seen = []
        optimizer.register_step_pre_hook(
            lambda *_: seen.append((weights(model), torch.get_rng_state(), optimizer.count))
        )
        optimizer.step()
        (state, random_then, count), *others = seen
        assert not others
        assert_equal(state, before)
        assert torch.equal(random, random_then)
        assert count == 0
        return optimizer.count

    assert run_ranks(2, fn) == [1, 1]


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


def test_large_parameters_and_the_warning_of_what_is_not_known() -> None:
    def fn(rank: int):
        found: dict[str, tuple[str, list[str]]] = {}
        log: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: log.append(record.getMessage())
        logging.getLogger("torchloom").addHandler(handler)
        declared = type("Declared", (Lion,), {"elementwise": True})
        known = (torch.optim.AdamW, torch.optim.ASGD, declared)
        for kind in (QuantizedStates, FactoredLarge, *known, Lion, Lion, OwnStep):
            model = torchloom.shard_model(nn.Linear(192, 160), 3, persistence_threshold=0)
            model(torch.ones(2, 192)).sum().backward()
            log.clear()
            text = outcome(kind(model.parameters()).step)
            found.setdefault(kind.__name__, (text, []))[1].extend(log)
        return found

    for rank, found in enumerate(run_ranks(2, fn)):
        for name in ("QuantizedStates", "FactoredLarge"):
            assert found[name][0].startswith(f"EngineError: {name} cannot step shards"), found
        assert "a state of shape" in found["QuantizedStates"][0]
        warned = {name: lines for name, (text, lines) in found.items() if text == "none"}
        assert {name: len(lines) for name, lines in warned.items()} == {
            **dict.fromkeys(("AdamW", "ASGD", "Declared"), 0),
            **dict.fromkeys(("Lion", "OwnStep"), int(rank == 0)),
        }
        assert rank or "Lion steps shards of parameters at ZeRO stage 3" in warned["Lion"][0]


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
