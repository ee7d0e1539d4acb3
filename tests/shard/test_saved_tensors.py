"""Stage 3 in Python: what autograd saves in a forward pass comes back as it was, and is freed with its graph."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

from support.memory import measure
from support.pool import run_ranks
from support.runs import SGD, sharded
from torchloom.shard import gathered

WIDTH = 6


class Viewed(nn.Module):
    """Multiplies by views of its weight that as_strided of a float tensor cannot make."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(5, WIDTH, 2))

    def factor(self) -> Tensor:
        return torch.view_as_complex(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.fft.fft(self.first(x)) * self.factor()).abs().square().mean()


class Imaginary(Viewed):
    """The imaginary part of a conjugate is a view that is read negated."""

    def factor(self) -> Tensor:
        return torch.view_as_complex(self.weight).conj().imag


class Turned(Viewed):
    def factor(self) -> Tensor:
        return torch.view_as_complex(self.weight).mT.conj().mT[1:2]


@pytest.mark.parametrize("kind", [Viewed, Imaginary, Turned])
def test_views_of_other_types_are_made_again(kind: type[Viewed]) -> None:
    def fn(rank: int) -> bool:
        torch.manual_seed(0)
        plain = kind()
        model = copy.deepcopy(plain)
        engine = sharded(model, optimizer=SGD)
        x = torch.randn(5, WIDTH)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        plain(x).backward()
        optimizer.step()
        engine.backward(engine(x))
        engine.step()
        with gathered(model):
            torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
        return True

    assert run_ranks(2, fn) == [True, True]


class Wide(nn.Module):
    """All operators save their results."""

    def __init__(self, in_python: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64)
        self.in_python = in_python

    def body(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(torch.relu(self.lin(x))), -1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.compiler.disable(self.body)(x) if self.in_python else self.body(x)


X_BYTES = 256 * 64 * 4


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_without_backward_keeps_nothing(stage: int, backend: str | None) -> None:
    def fn(rank: int) -> int:
        engine = sharded(
            nn.Sequential(Wide(True), Wide(False)), stage=stage, batch=256, optimizer=SGD
        )
        if backend is not None:
            engine.compile(backend=backend)
        x = torch.randn(256, 64)
        for _ in range(2):
            engine(x)

        def run() -> None:
            for _ in range(50):
                engine(x)
            gc.collect()

        return measure(run).kept

    for kept in run_ranks(2, fn):
        assert kept < X_BYTES


def test_graphs_that_are_kept_and_dropped_are_freed() -> None:
    """A discriminator's forward of detached samples; a graph that runs backward twice."""

    def fn(rank: int) -> int:
        makes = sharded(Wide(True), batch=256, optimizer=SGD)
        judges = sharded(Wide(True), batch=256, optimizer=SGD)
        z = torch.randn(256, 64)

        def run() -> None:
            for _ in range(20):
                judges(makes(z).detach()).sum()
                loss = judges(makes(z)).square().sum()
                loss.backward(retain_graph=True)
                loss.backward()
                for engine in (makes, judges):
                    engine.zero_grad()
            gc.collect()

        run()
        return measure(run).kept

    for kept in run_ranks(2, fn):
        assert kept < X_BYTES


def test_what_is_written_after_it_was_saved_is_an_error() -> None:
    """As it is without hooks: gradients would be wrong."""

    class Writes(Wide):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.lin(x))
            z = y.square()
            y.mul_(2.0)
            return z

    def fn(rank: int) -> str:
        engine = sharded(Writes(True), batch=256, optimizer=SGD)
        with pytest.raises(RuntimeError) as caught:
            engine.backward(engine(torch.randn(4, 64)).sum())
        return str(caught.value)

    for text in run_ranks(2, fn):
        assert "modified by an inplace operation" in text


def test_second_derivatives() -> None:
    def fn(rank: int) -> bool:
        torch.manual_seed(0)
        plain = Wide(True)
        model = copy.deepcopy(plain)
        engine = sharded(model, batch=256, optimizer=SGD)
        x = torch.randn(4, 64)
        found = []
        for call in (plain, engine):
            t = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(call(t).square().sum(), t, create_graph=True)
            slope.square().sum().backward()
            found.append(t.grad)
        torch.testing.assert_close(found[0], found[1])
        return True

    assert run_ranks(2, fn) == [True, True]
