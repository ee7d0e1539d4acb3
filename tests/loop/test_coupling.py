"""Optimizers that compute numbers of several parameters: found by a parameter that is stepped alone, or right by their own sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchloom
from loop.test_ownership import Odd, assert_near, loss_of
from support.optimizers import Base
from support.pool import run_ranks
from torchloom.errors import EngineError


class NormOfAll(Base):
    """Scales each update by a norm over all gradients, which it keeps nowhere."""

    def step(self, closure: Any = None) -> None:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm() if grads else torch.zeros(())
        self.scale = lambda: 1 / (1 + norm)
        super().step()

    def update(self, param: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.add_(param.grad, alpha=-group["lr"] * float(self.scale()))


class NormFromTheSecondStep(NormOfAll):
    def update(self, param: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        if group["k"] > 1:
            super().update(param, group, state)


class Chance(Base):
    """Draws numbers: nothing can be compared, and nothing is refused."""

    def update(self, param: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.add_(param.grad * torch.rand_like(param), alpha=-group["lr"])


class LossOfThisRank(Base):
    """Keeps an average of the loss among its states, by a name."""

    def step(self, closure: Any = None) -> None:
        self.state["average"] = {"short": float(closure())}
        super().step()

    def update(self, param: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.add_(param.grad, alpha=-group["lr"])


def test_what_depends_on_other_parameters_is_refused_before_a_weight_changes() -> None:
    def fn(rank: int):
        for stage in (1, 3):
            for kind, step in (
                (NormOfAll, 1),
                (NormFromTheSecondStep, 2),
                (Chance, 0),
                (LossOfThisRank, 1),
            ):
                model = torchloom.shard_model(Odd(), stage, persistence_threshold=0)
                optimizer = kind(model.parameters())
                closures = [lambda: float(rank)] if kind is LossOfThisRank else []
                for number in (1, 2):
                    before = {name: value.clone() for name, value in model.state_dict().items()}
                    loss_of(model, number, rank, 2).backward()
                    if number == step:
                        with pytest.raises(EngineError, match=r"something else|keeps numbers"):
                            optimizer.step(*closures)
                        for name, value in model.state_dict().items():
                            assert torch.equal(value, before[name])
                        break
                    optimizer.step(*closures)
                    optimizer.zero_grad()
        model = torchloom.shard_model(Odd(), 3, persistence_threshold=0)
        declared = NormOfAll(model.parameters())
        declared.elementwise = True
        loss_of(model, 0, rank, 2).backward()
        with pytest.raises(EngineError, match="NormOfAll makes something else of a parameter"):
            declared.step()

    run_ranks(2, fn)


class Prodigy(Base):
    """One step size of all parameters, summed over ranks where it is told to: as that of prodigyopt."""

    __module__ = "prodigyopt.prodigy"

    def step(self, closure: Any = None) -> None:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.total = sum(grad.abs().sum() for grad in grads)
        if self.param_groups[0]["fsdp_in_use"]:
            dist.all_reduce(self.total)
        super().step()

    def update(self, param: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        average = state.setdefault("average", torch.zeros_like(param)).lerp_(param.grad, 0.1)
        param.add_(average, alpha=-group["lr"] / float(1 + self.total))


def test_one_number_of_all_parameters_is_right_where_it_is_summed_over_ranks() -> None:
    plain = Odd()
    expected = Prodigy(plain.parameters(), lr=3.0, fsdp_in_use=False)
    for step in range(4):
        loss_of(plain, step, 0, 1).backward()
        expected.step()
        expected.zero_grad()
    weights = {name: value.detach().clone() for name, value in plain.named_parameters()}

    def fn(rank: int, size: int):
        for stage in (1, 3):
            model = torchloom.shard_model(Odd(), stage, persistence_threshold=0)
            optimizer = Prodigy(model.parameters(), lr=3.0, fsdp_in_use=True, slice_p=1)
            for step in range(4):
                loss_of(model, step, rank, size).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_near(model.state_dict(), weights, (stage, size))
        for threshold, options, text in (
            (20, {"fsdp_in_use": True}, "count once for each"),
            (0, {"fsdp_in_use": False}, "pass fsdp_in_use=True"),
            (0, {"fsdp_in_use": True, "slice_p": 11}, "pass fsdp_in_use=True, slice_p=1"),
        ):
            model = torchloom.shard_model(Odd(), 3, persistence_threshold=threshold)
            optimizer = Prodigy(model.parameters(), **options)
            loss_of(model, 0, rank, size).backward()
            with pytest.raises(EngineError, match=text):
                optimizer.step()

    run_ranks(2, fn, 2)
