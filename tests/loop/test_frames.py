"""Compiled models whose code Dynamo gives up in places: torchloom's own functions, entered there, are not compiled.

A property that gathers, a hook of autograd, an operator's body: Dynamo would take each of them for a function
to compile, wherever the code around it runs in Python.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchloom
from support.pool import run_ranks
from support.runs import SGD, sharded

WIDTH = 7


class GradientsInForward(nn.Module):
    """Its compiled backward is made while forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        t = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.a(t).square().sum(), t)
        return self.a(x + slope)


class BackwardHooks(nn.Module):
    """Dynamo breaks at modules that have backward hooks, and skips frames of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.parts = nn.Sequential(
            nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 11), nn.LayerNorm(11)
        )
        for part in self.parts:
            part.register_full_backward_hook(self.see)

    def see(self, *_: object) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


class BreaksInLoops(nn.Module):
    """Where a graph breaks inside of `for` and `try`, Dynamo gives up the function and takes what it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH + i) for i in range(3))
        self.table = nn.Embedding(5, WIDTH)
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for part in self.parts:
            try:
                torch._dynamo.graph_break()
                total = total + part(x).square().mean()
            finally:
                x = x + 0.1
        return total + self.head(x + 0.1 * self.table.weight.sum(0)).sigmoid().mean()


class Recurrent(nn.Module):
    """Dynamo skips the forward of torch's recurrent layers."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, 5, **options)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


MAKERS = {
    "gradients": GradientsInForward,
    "hooks": BackwardHooks,
    "loops": BreaksInLoops,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU, num_layers=2),
    "rnn": lambda: Recurrent(nn.RNN),
}


def plainly(make) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(5)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 3, WIDTH, requires_grad=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, list(model.parameters())


def compiled(make, stage: int, backend: str) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(5)
    model = make()
    engine = sharded(model, stage=stage, optimizer=SGD, compile={"strict": True})
    engine.compile(backend=backend)
    losses = []
    for _ in range(3):
        loss = engine(torch.randn(4, 3, WIDTH, requires_grad=True)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with torchloom.shard.gathered(model):
        return losses, [param.detach().clone() for param in model.parameters()]


def agrees(rank: int, name: str, stage: int, backend: str) -> bool:
    expected, found = plainly(MAKERS[name]), compiled(MAKERS[name], stage, backend)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
    return True


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_forward_takes_gradients(stage: int, world: int) -> None:
    assert (
        run_ranks(world, agrees, "gradients", stage, "aot_eager", timeout_s=300) == [True] * world
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["hooks", "loops", "lstm", "gru", "rnn"])
def test_functions_that_dynamo_gives_up(name: str, stage: int) -> None:
    assert run_ranks(2, agrees, name, stage, "aot_eager", timeout_s=300) == [True] * 2


@pytest.mark.parametrize("name", ["gradients", "hooks", "lstm"])
def test_inductor(name: str) -> None:
    assert run_ranks(2, agrees, name, 3, "inductor", timeout_s=180) == [True] * 2


def test_a_forward_without_breaks_is_still_one_graph() -> None:
    def fn(rank: int) -> int:
        model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))
        engine = sharded(model)
        engine.compile(backend="aot_eager", compile_kwargs={"fullgraph": True})
        engine(torch.randn(3, WIDTH))
        return len(engine.compile_report().graphs)

    assert run_ranks(2, fn) == [1, 1]
