"""Loops of one's own with two optimizers over one model: compiled, scheduled, saved and resumed as in one process."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import torchloom
from loop.test_ownership import Odd, assert_near, loss_of, muon_and_adamw, newton_schulz_in_fp32
from support.optimizers import Base, Lamb
from support.pool import run_ranks
from torchloom.errors import ConfigError
from torchloom.events import OwnersChosen, Recorder, StepEnded
from torchloom.position import POSITION
from torchloom.report.page.render import views


def schedules_of(optimizers: list[Optimizer]) -> list[LambdaLR]:
    return [
        LambdaLR(optimizers[0], lambda step: 0.8**step),
        LambdaLR(optimizers[1], lambda step: 1 / (1 + step)),
    ]


def train(
    model: Any,
    optimizers: list[Optimizer],
    schedules: list[LambdaLR],
    rank: int,
    size: int,
    steps: range,
) -> None:
    with newton_schulz_in_fp32():
        for step in steps:
            loss_of(model, step, rank, size).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


def test_two_optimizers_and_their_schedules_resume_on_other_ranks_and_stages(tmp_path) -> None:
    plain = Odd()
    expected = muon_and_adamw(plain)
    schedules = schedules_of(expected)
    train(plain, expected, schedules, 0, 1, range(4))
    middle = {name: value.detach().clone() for name, value in plain.named_parameters()}
    train(plain, expected, schedules, 0, 1, range(4, 8))

    def fn(rank: int, size: int, stage: int, resumes: bool):
        model = torchloom.shard_model(Odd(), stage, persistence_threshold=0)
        optimizers = muon_and_adamw(model)
        schedules = schedules_of(optimizers)
        torchloom.compile(model, optimizer=optimizers, backend="aot_eager")
        parts = [*optimizers, *schedules]
        if resumes:
            file = torch.load(tmp_path / "run.pt", weights_only=True)
            model.load_state_dict(file["model"])
            for part, state in zip(parts, file["parts"], strict=True):
                part.load_state_dict(state)
        else:
            with Recorder() as recorder:
                train(model, optimizers, schedules, rank, size, range(4))
            file = {"model": model.state_dict(), "parts": [each.state_dict() for each in parts]}
            assert_near(file["model"], middle, (size, stage))
            if rank == 0:
                torch.save(file, tmp_path / "run.pt")
            told = [event for event in recorder.events if isinstance(event, StepEnded)]
            assert [each.step for each in told] == [1, 2, 3, 4]
            assert told[1].lr == pytest.approx(2e-2 * 0.8**2)  # the first optimizer has moved on
            assert (POSITION.step, POSITION.updates) == (4, 8)
        train(model, optimizers, schedules, rank, size, range(4, 8))
        states = [each.state_dict()["state"] for each in optimizers]
        return model.state_dict(), states

    for size, stage, resumes in ((2, 3, False), (2, 1, True), (3, 3, True)):
        for weights, states in run_ranks(size, fn, size, stage, resumes):
            assert_near(weights, dict(plain.named_parameters()), (size, stage))
            for optimizer, found in zip(expected, states, strict=True):
                for index, state in optimizer.state_dict()["state"].items():
                    assert_near(found[index], state, (size, stage, index))


def test_what_is_no_optimizer_of_the_model_is_named() -> None:
    def fn(rank: int):
        model = torchloom.shard_model(Odd(), 3, persistence_threshold=0)
        other = torch.optim.SGD(nn.Linear(2, 2).parameters())
        for given, text in (
            ([*muon_and_adamw(model), other], "SGD.*steps none of this model's parameters"),
            (["adamw"], "is a str: pass a torch optimizer, or a list of these"),
            ([], "counts optimizer states: pass optimizer="),
        ):
            with pytest.raises(ConfigError, match=text):
                torchloom.compile(model, config={"memory_budget": "1GB"}, optimizer=given)

    run_ranks(2, fn)


def test_report_says_who_owns_what_and_what_it_costs() -> None:
    def fn(rank: int):
        model = torchloom.shard_model(Odd(), 3, persistence_threshold=0)
        optimizers = muon_and_adamw(model)
        with torchloom.watch() as watched:
            session = torchloom.compile(
                model, optimizer=optimizers, backend="aot_eager", config={"memory_budget": "1GB"}
            )
            with Recorder() as recorder:
                train(model, optimizers, schedules_of(optimizers), rank, 2, range(1))
        states = [state for each in optimizers for state in each.state.values()]
        held = [v.untyped_storage().nbytes() for s in states for v in s.values() if v is not None]
        parts = [size for kind, _, size in session.standing.parts if kind == "optimizer states"]
        assert sum(parts) == sum(held)  # of both, as their own code makes them
        muon, adamw = session.report.owners
        sent, named = 0, dict(model.named_parameters())
        for name, shape, owner in muon.parameters:
            numel = math.prod(shape)
            first = -(-numel // 2)
            sent += 3 * 4 * (numel - (first, numel - first)[owner])
            assert bool(optimizers[0].state.get(named[name])) == (owner == rank)
        assert muon.step_bytes == sent and muon.num_divided == 0
        assert (adamw.parameters, adamw.step_bytes) == ((), 0) and adamw.num_divided == 5
        assert muon.reason == "it computes with whole parameters"
        told = [event for event in recorder.events if isinstance(event, OwnersChosen)]
        assert {each.optimizer for each in told} == {"Muon", "AdamW"}
        page = json.dumps(views(watched.record, None))
        return "Parameters that one rank steps for all" in page and "11 x 7" in page

    assert run_ranks(2, fn) == [True, True]


class Lion(Base):
    """Elementwise, and of a class that nobody has read."""

    def update(self, param: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        param.add_((0.9 * average + 0.1 * param.grad).sign(), alpha=-group["lr"])
        average.lerp_(param.grad, 0.05)


def swap_group(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    """Step other parameters, as many as before, at another rate."""
    optimizer.param_groups[0]["params"] = params
    optimizer.param_groups[0]["lr"] = 2e-3


def test_other_parameters_in_a_group_and_states_of_shards_and_of_owners() -> None:
    """States of an optimizer load whether it was declared elementwise, then or now; groups may change in the loop."""

    def parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        params = list(model.parameters())
        return params[:5], params[5:10]

    def steps(model: Any, optimizer: Optimizer, rank: int, size: int, first: int) -> None:
        for step in range(first, first + 2):
            loss_of(model, step, rank, size).backward()
            optimizer.step()
            model.zero_grad()

    def fn(rank: int, size: int):
        model = Odd() if size == 1 else torchloom.shard_model(Odd(), 3, persistence_threshold=0)
        before, after = parts(model)
        made = [Lion(before, lr=1e-3) for _ in range(3)]
        for turn, optimizer in enumerate(made):
            optimizer.elementwise = turn == 1  # type: ignore[attr-defined]
            if turn:
                torchloom.shard.whole_states(optimizer)
                optimizer.load_state_dict(made[turn - 1].state_dict())
            steps(model, optimizer, rank, size, 2 * turn)
        swapped = Lamb(before)
        steps(model, swapped, rank, size, 6)
        swap_group(swapped, after)
        steps(model, swapped, rank, size, 8)
        return (
            {name: value.detach().clone() for name, value in model.named_parameters()}
            if size == 1
            else model.state_dict()
        )

    expected = fn(0, 1)
    for found in run_ranks(2, fn, 2):
        assert_near(found, expected, "groups")
