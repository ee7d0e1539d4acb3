"""Transforms of torch.func over functions that use a sharded model's weights, and calls with others' weights."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import torchloom
from support.pool import run_ranks
from support.runs import SGD, sharded
from torchloom.errors import CompileError, ShardError
from torchloom.shard import gathered

WIDTH = 5


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def energy(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + torch.func.grad(self.energy)(x)


class Jacobian(Slope):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + torch.func.jacrev(self.energy)(x)


class Tangent(Slope):
    def forward(self, x: Tensor) -> Tensor:
        value, tangent = torch.func.jvp(self.energy, (x,), (torch.ones_like(x),))
        return self.lin(x) + value + tangent


class Batched(Slope):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + torch.func.vmap(self.energy)(x)[:, None]


class Writing(Slope):
    def energy(self, x: Tensor) -> Tensor:
        weight = self.lin.weight
        with torch.no_grad():
            weight.clamp_(-0.1, 0.1)
        return super().energy(x)


def agrees(rank: int, kind: type[Slope], stage: int, compiled: bool) -> bool:
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    engine = sharded(model, stage=stage, optimizer=SGD, compile={"strict": True})
    if compiled:
        engine.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(3, WIDTH)
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(x).square().mean())
        engine.step()
    with gathered(model):
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
    return True


@pytest.mark.parametrize("kind", [Slope, Jacobian, Tangent, Batched])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_compiled(stage: int, kind: type[Slope]) -> None:
    assert run_ranks(2, agrees, kind, stage, True, timeout_s=300) == [True, True]


class Dual(Slope):
    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            value, tangent = forward_ad.unpack_dual(torch.tanh(self.lin(dual)))
            return value + tangent


@pytest.mark.parametrize(
    ("stage", "kind"),
    [*product([0, 1, 2, 3], [Slope, Jacobian, Tangent]), (3, Dual)],
)
def test_in_python(stage: int, kind: type[Slope]) -> None:
    assert run_ranks(2, agrees, kind, stage, False, timeout_s=300) == [True, True]


def test_around_an_engine() -> None:
    def fn(rank: int) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1))
        x = torch.randn(3, WIDTH)
        for stage in (1, 3):
            engine = sharded(copy.deepcopy(plain), stage=stage, optimizer=SGD)
            for act in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
                expected = act(lambda x: plain(x).sum())(x)
                found = act(lambda x: engine(x).sum())(x)  # noqa: B023
                torch.testing.assert_close(found, expected)
            with (
                pytest.raises(RuntimeError, match="saved tensor hooks"),
                torch.autograd.graph.save_on_cpu(),  # the program's own hooks
            ):
                torch.func.grad(lambda x: engine(x).sum())(x)  # noqa: B023
            engine.backward(engine(x).square().mean())
            engine.step()

    run_ranks(2, fn)


@pytest.mark.parametrize("compiled", [False, True])
def test_writes_inside_are_refused(compiled: bool) -> None:
    def told(rank: int) -> str:
        engine = sharded(Writing(), stage=2, optimizer=SGD)
        if compiled:
            engine.compile(backend="aot_eager")
        with pytest.raises(ShardError) as caught:
            engine(torch.randn(3, WIDTH))
        return str(caught.value)

    for text in run_ranks(2, told):
        assert text.startswith("forward writes into the weight 'lin.weight'")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_functional_calls_use_the_tensors_that_they_are_given(stage: int, compiled: bool) -> None:
    def fn(rank: int) -> bool:
        torch.manual_seed(0)
        plain = Tied()
        model = copy.deepcopy(plain)
        engine = sharded(model, stage=stage, optimizer=SGD)
        if compiled:
            engine.compile(backend="aot_eager")
        torch.manual_seed(rank)  # what is given differs between ranks, and so do its gradients
        x = torch.randn(3, WIDTH)
        given = {name: torch.randn_like(p) for name, p in plain.named_parameters()}
        grads = []
        for module in (plain, model):
            own = {name: t.clone().requires_grad_() for name, t in given.items()}
            torch.func.functional_call(module, own, (x,)).square().sum().backward()
            grads.append([t.grad for t in own.values()])
        torch.testing.assert_close(grads[1], grads[0])
        pieces = {name: p.detach() for name, p in model.named_parameters()}
        with torch.no_grad():
            same = torch.func.functional_call(model, pieces, (x,))
            torch.testing.assert_close(same, plain(x))
        return True

    assert run_ranks(2, fn, timeout_s=300) == [True, True]


def test_gradients_of_gradients_are_right_or_told() -> None:
    """A penalty differentiates a gradient, for which torch's compiled backward has no derivative."""

    def stepped(net: nn.Module) -> nn.Module:
        x = torch.ones(2, WIDTH, requires_grad=True)
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        return net

    def fn(rank: int) -> str:
        torch.manual_seed(0)
        start = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 1))
        plain = stepped(copy.deepcopy(start))
        for stage, backend in ((1, ""), (3, ""), (3, "eager"), (3, "aot_eager")):
            net = copy.deepcopy(start)
            torchloom.shard_model(net, stage=stage, persistence_threshold=0)
            if backend:
                torchloom.compile(net, backend=backend)
            if backend == "aot_eager":
                with pytest.raises(CompileError) as caught:
                    stepped(net)
                return str(caught.value)
            stepped(net)
            with gathered(net):
                torch.testing.assert_close(list(net.parameters()), list(plain.parameters()))
        raise AssertionError("not reached")

    for told in run_ranks(2, fn):
        assert 'backend="eager"' in told
