"""An engine whose model calls another engine's model: one graph, facts about each parameter by its own engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.pool import run_ranks
from support.runs import SGD, sharded
from torchloom.engine import Engine

WIDTH = 6


class Part(nn.Module):
    def __init__(self, seed: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.__dict__["inner"] = inner  # not a child: its weights are not ours

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, inner = self.layer(x), self.__dict__["inner"]
        return x if inner is None else inner(torch.tanh(x))


def started(net: nn.Module, stage: int, **offload: object) -> Engine:
    return sharded(net, stage, optimizer=SGD, backend="aot_eager", zero=offload)


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    whole = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
    return whole if rank is None else whole[3 * rank : 3 * rank + 3]


def plain() -> list[torch.Tensor]:
    inner = Part(1)
    outer = Part(2, inner)
    params = [*outer.parameters(), *inner.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(3):
        outer(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in params]


OFFLOAD = {"offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("outer", "inner", "offload"),
    [(1, 0, {}), (0, 1, {}), (1, 1, {}), (3, 1, {}), (3, 3, OFFLOAD), (2, 3, {})],
)
def test_each_parameter_is_treated_as_its_own_engine_says(outer, inner, offload) -> None:
    def fn(rank):
        within = started(Part(1), inner)
        engine = started(Part(2, within.module), outer, **offload)
        for step in range(3):
            engine.backward(engine(batch(step, rank)).square().mean())
            engine.step()
            within.step()
        return [
            value.clone()
            for each in (engine, within)
            for value in each.module.state_dict().values()
        ], [graph.fallback for graph in engine.compile_report().graphs]

    wanted = plain()
    for found, fallbacks in run_ranks(2, fn):
        assert not any(fallbacks)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
