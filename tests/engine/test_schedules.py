"""Schedules take DeepSpeed's rates: `deepspeed_rates.json` holds what DeepSpeed 0.19.6 computes.

Each case has the rates of two groups (made with 0.01 and 0.02) at each step, and at which steps an overflow
kept the schedule from moving.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from support.runs import settings, train
from torchloom.config import load_config
from torchloom.engine.schedules import make_lr_scheduler, make_scheduler
from torchloom.errors import ConfigError

CASES = json.loads((Path(__file__).parent / "deepspeed_rates.json").read_text())


def build(case: dict, tensor_rate: bool = False):
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.01, 0.02)]
    if tensor_rate:
        groups = [{**group, "lr": torch.tensor(group["lr"])} for group in groups]
    optimizer = getattr(torch.optim, case["optimizer"])(groups)
    config = load_config({"scheduler": {"type": case["type"], "params": case["params"]}})
    return optimizer, make_lr_scheduler(config, None, optimizer)


def follow(case: dict, optimizer, schedule, steps: range, taken: dict) -> None:
    for step in steps:
        taken["rates"].append([float(group["lr"]) for group in optimizer.param_groups])
        betas = [list(group.get("betas", ())) for group in optimizer.param_groups]
        taken["betas"].append(betas)
        if step not in case["skipped"]:
            optimizer.step()
            schedule.step()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['type']}-{case['params']}"[:60])
def test_rates_are_deepspeeds(case) -> None:
    total = len(case["rates"])
    for resumed_at in (total, 1, 3, total - 2):
        taken: dict = {"rates": [], "betas": []}
        optimizer, schedule = build(case)
        follow(case, optimizer, schedule, range(resumed_at), taken)
        if resumed_at < total:
            saved = optimizer.state_dict(), schedule.state_dict()
            optimizer, schedule = build(case)
            optimizer.load_state_dict(saved[0])
            schedule.load_state_dict(saved[1])
            if (
                resumed_at - 1 not in case["skipped"]
                and "last_batch_iteration" not in case["params"]
            ):
                assert schedule.get_last_lr() == [g["lr"] for g in optimizer.param_groups]
            follow(case, optimizer, schedule, range(resumed_at, total), taken)
        for found, wanted in zip(taken["rates"], case["rates"], strict=True):
            assert found == pytest.approx(wanted, rel=1e-12, abs=1e-18)
        for found, wanted in zip(taken["betas"], case.get("betas", ()), strict=False):
            for pair, expected in zip(found, wanted, strict=True):
                assert pair == pytest.approx(expected, rel=1e-12)


def test_a_list_of_another_length_than_the_groups_is_an_error() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(ConfigError, match=r"warmup_max_lr: 2 values for 1 parameter groups; write"):
        make_scheduler("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, optimizer)


def test_step_takes_a_position_as_deepspeeds_does() -> None:
    optimizer, schedule = build(CASES[3])
    optimizer.step()
    schedule.step(3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(CASES[3]["rates"][4][0])


def test_an_engine_takes_them_also_when_it_skips_and_loads(tmp_path) -> None:
    params = {"warmup_max_lr": 1e-2, "warmup_num_steps": 5, "warmup_type": "linear"}
    config = settings(
        3,
        fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        scheduler={"type": "WarmupLR", "params": params},
    )

    def fn(rank):
        engine, *_ = torchloom.initialize(model=tricky(), config=config)
        rates = []

        def step(engine, scale=1.0):
            rates.append(engine.get_lr()[0])
            engine.backward(engine(tokens(1, rank)) * scale)
            engine.step()

        for scale in (1.0, float("inf"), 1.0, 1.0):
            step(engine, scale)
        engine.save_checkpoint(tmp_path)
        loaded, *_ = torchloom.initialize(model=tricky(1), config=config)
        loaded.load_checkpoint(tmp_path)
        for scale in (1.0, float("inf"), 1.0):
            step(loaded, scale)
        return rates

    wanted = [0.0, 0.0, 0.0, 0.002, 0.004, 0.006, 0.006]
    for rates in run_ranks(2, fn):
        assert rates == pytest.approx(wanted, rel=1e-12)


class Own(StepLR):
    """A schedule's class, which is called with the optimizer."""

    def __init__(self, optimizer) -> None:
        super().__init__(optimizer, 1)


def test_a_callable_gets_the_optimizer_and_an_object_must_be_of_it() -> None:
    def fn(rank):
        made = []
        for given in (partial(StepLR, step_size=1), Own):
            engine, optimizer, _, schedule = torchloom.initialize(
                model=tricky(), config=settings(), lr_scheduler=given
            )
            train(engine, rank, 1)
            made.append((type(schedule).__name__, schedule.optimizer is optimizer))
        other = StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 1)
        with pytest.raises(ConfigError, match="StepLR follows another optimizer") as caught:
            torchloom.initialize(model=tricky(), config=settings(), lr_scheduler=other)
        return made, str(caught.value).count(". ")

    for made, periods in run_ranks(2, fn):
        assert (made, periods) == ([("StepLR", True), ("Own", True)], 0)


def test_a_cycle_tells_its_momentum() -> None:
    """As DeepSpeed's, `get_mom` begins at the highest beta, which the first step does not take."""
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2}
    schedule = make_scheduler("OneCycle", params, optimizer)
    told = []
    for _ in range(4):
        told.append(schedule.get_mom())
        optimizer.step()
        schedule.step()
        assert schedule.get_mom() == [optimizer.param_groups[0]["betas"]]
    assert told == [[(pytest.approx(beta), 0.99)] for beta in (0.9, 0.85, 0.8, 0.85)]
    still = make_scheduler("OneCycle", {**params, "cycle_momentum": False}, optimizer)
    assert still.get_mom() is None


def test_schedules_tell_their_settings_by_deepspeeds_names() -> None:
    optimizer = torch.optim.Adam([{"params": [torch.zeros(1)], "lr": rate} for rate in (0.1, 0.2)])
    warmup = make_scheduler("WarmupLR", {"warmup_num_steps": 5}, optimizer)
    assert (warmup.min_lrs, warmup.max_lrs) == ([0.0, 0.0], [0.1, 0.2])
    assert (warmup.warmup_num_steps, warmup.warmup_type) == (5, "log")
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=0.1)
    cosine = make_scheduler("WarmupCosineLR", {"total_num_steps": 9}, optimizer)
    for _ in range(3):
        assert cosine.get_lr_ratio() * 0.1 == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()
