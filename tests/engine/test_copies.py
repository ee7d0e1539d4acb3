"""Deep copies of sharded models: teachers and averages, which run with their own weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from support.pool import run_ranks
from support.runs import SGD, sharded

WIDTH = 7


class Rooted(nn.Module):
    """Has parameters of its own, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x + self.shift)))
        teacher = self.__dict__.get("teacher")
        return y if teacher is None else y - teacher(x).detach()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_copy_has_its_own_weights(stage: int, backend: str | None) -> None:
    def fn(rank: int) -> list[bool]:
        torch.manual_seed(0)
        model = Rooted()
        engine = sharded(model, stage=stage, optimizer=SGD)
        if backend is not None:
            engine.compile(backend=backend)
        x = torch.randn(3, WIDTH)
        with torch.no_grad():
            before = engine(x)
            twin, average = copy.deepcopy(model), AveragedModel(model)
            for param in model.parameters():
                param.add_(1.0)
            return [torch.allclose(each(x), before) for each in (twin, average, engine)]

    assert run_ranks(2, fn) == [[True, True, False]] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_copy_runs_inside_of_the_originals_forward(stage: int) -> None:
    def fn(rank: int) -> bool:
        torch.manual_seed(0)
        plain = Rooted()
        model = copy.deepcopy(plain)
        engine = sharded(model, stage=stage, optimizer=SGD)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        plain.__dict__["teacher"] = copy.deepcopy(plain)
        model.__dict__["teacher"] = copy.deepcopy(model)
        with torch.no_grad():
            for each in (plain, model):
                for param in each.__dict__["teacher"].parameters():
                    param.mul_(0.5)
        for _ in range(3):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
            expected, found = plain(x).square().mean(), engine(x).square().mean()
            torch.testing.assert_close(found, expected)
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(found)
            engine.step()
        return bool(expected > 0)

    assert run_ranks(2, fn) == [True, True]
