"""Schedule-free optimizers write averages into weights in `eval()` and `train()`, outside of their steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchloom
from support.optimizers import Base
from support.pool import run_ranks


class ScheduleFree(Base):
    """As schedulefree's: training weights lie between the fast ones, which are states, and their average."""

    def __init__(self, params, lr: float = 0.1, **rest) -> None:
        super().__init__(params, lr, is_training=False, **rest)

    def step(self, closure=None):
        if not all(group["is_training"] for group in self.param_groups):
            raise Exception("call train() before")
        super().step(closure)

    def update(self, param, group, state):
        fast = state.setdefault("fast", param.clone())
        param.lerp_(fast, 1 / group["k"]).add_(
            param.grad, alpha=-group["lr"] * (1 - 0.9 / group["k"])
        )
        fast.sub_(param.grad, alpha=group["lr"])

    @torch.no_grad()
    def _switch(self, is_training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["is_training"] != is_training:
                group["is_training"] = is_training
                for param in group["params"]:
                    if "fast" in self.state[param]:
                        param.lerp_(self.state[param]["fast"], weight)

    def eval(self) -> None:
        self._switch(False, 1 - 1 / 0.9)

    def train(self) -> None:
        self._switch(True, 1 - 0.9)


class ByRows(ScheduleFree):
    """Not elementwise, and declared to step by parts."""

    by_parts = True

    def update(self, param, group, state):
        param.grad = (
            param.grad / param.grad.flatten(1).norm(dim=1).max() if param.dim() > 1 else param.grad
        )
        super().update(param, group, state)

    def eval(self) -> None:
        super().eval()


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 2, bias=False), nn.Tanh(), nn.Linear(2, 5), nn.Linear(5, 3))


def outputs(model, optimizer, rank: int, size: int) -> list[torch.Tensor]:
    """Return results of the model while it trains and is evaluated in turn."""
    found = []
    optimizer.train()
    for step in range(4):
        data = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        model(data[rank * 6 // size : (rank + 1) * 6 // size]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        optimizer.eval()
        found.append(model(torch.ones(1, 8)).detach())
        optimizer.train()
        found.append(model(torch.ones(1, 8)).detach())
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_equal_to_one_process(size: int) -> None:
    makers = {
        "elementwise": lambda params: ScheduleFree(params, elementwise=True),
        "owned": lambda params: ScheduleFree(params),
        "by parts": lambda params: ByRows(params),
    }
    expected = {}
    for name, make in makers.items():
        model = model_of()
        expected[name] = outputs(model, make(model.parameters()), 0, 1)

    def fn(rank: int) -> None:
        for name, make in makers.items():
            for stage in (1, 2, 3):
                for compiled in (False, True):
                    model = torchloom.shard_model(model_of(), stage, persistence_threshold=0)
                    optimizer = make(model.parameters())
                    if compiled:  # before the first train(): the optimizer refuses to step
                        torchloom.compile(model, backend="aot_eager", optimizer=optimizer)
                    found = outputs(model, optimizer, rank, size)
                    differ = max(
                        (one - other).abs().max().item()
                        for one, other in zip(found, expected[name], strict=True)
                    )
                    assert differ < 1e-5, (name, stage, compiled)

    run_ranks(size, fn)


def test_of_an_engine() -> None:
    reference = model_of()
    expected = outputs(reference, ScheduleFree(reference.parameters()), 0, 1)

    def fn(rank: int) -> None:
        for stage in (1, 3):
            model = model_of()
            optimizer = ScheduleFree(model.parameters(), elementwise=stage == 1)
            config = {
                "train_micro_batch_size_per_gpu": 3,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            }
            engine, *_ = torchloom.initialize(model=model, optimizer=optimizer, config=config)
            engine.compile(backend="aot_eager")
            found = []
            optimizer.train()
            for step in range(4):
                data = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
                engine.backward(engine(data[rank * 3 : rank * 3 + 3]).square().mean())
                engine.step()
                for switch in (optimizer.eval, optimizer.train):
                    switch()
                    with torch.no_grad():
                        found.append(engine(torch.ones(1, 8)))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    run_ranks(2, fn)
