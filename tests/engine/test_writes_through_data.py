"""What users do to parameters and their optimizer counts as with plain torch, at every stage that promises it.

At stage 1 a rank steps its slice of a whole weight: the optimizer still holds the model's own parameters.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torchloom
from support.pool import run_ranks
from support.runs import sharded
from torchloom.engine import Engine
from torchloom.errors import ShardError
from torchloom.shard import full_state_dict

WIDTH = 7
"""Odd, so that no weight divides evenly between two ranks."""


def model(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 3))


DECAYED = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}


def started(net: nn.Module, stage: int, optimizer: Any = DECAYED) -> Engine:
    return sharded(net, stage, optimizer=optimizer)


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    whole = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
    return whole if rank is None else whole[3 * rank : 3 * rank + 3]


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what="") -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=f"{what} {name}")


def by_vector(net: nn.Module, step: int) -> None:
    """New data for all parameters, as views of one tensor."""
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(vector * 0.5 + 0.01 * step, net.parameters())


def by_clones(net: nn.Module, step: int) -> None:
    net._apply(lambda tensor: tensor.clone())


def by_transposed(net: nn.Module, step: int) -> None:
    """New data that is not contiguous."""
    weight = dict(net.named_parameters())["0.weight"]
    weight.data = (weight.data * 0.5).t().contiguous().t()


def by_swaps(net: nn.Module, step: int) -> None:
    """As averaged weights are evaluated: other data and back, and other data for good."""
    kept = [param.data for param in net.parameters()]
    for param in net.parameters():
        param.data = torch.zeros_like(param)
    for param, data in zip(net.parameters(), kept, strict=True):
        param.data = data
    if step == 1:
        other = [data.clone().mul_(0.5) for data in kept]
        for param, data in zip(net.parameters(), other, strict=True):
            param.data = data


def one_of_two(net: nn.Module, step: int) -> None:
    """A view at the front of a storage of just the padded size: what lies behind is another's."""
    bias = dict(net.named_parameters())["2.bias"]
    vector = torch.cat([bias.data, bias.data[:1]])
    bias.data = vector[:3]
    net.behind = vector[3:]


WRITES = {
    each.__name__: each for each in (by_vector, by_clones, by_transposed, by_swaps, one_of_two)
}


def plain(write, steps: int) -> dict[str, torch.Tensor]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(steps):
        write(net, step)
        net(batch(step)).square().mean().backward()
        write(net, step)
        optimizer.step()
        optimizer.zero_grad()
    return state(net)


@pytest.mark.parametrize(("stage", "compiled"), [(0, False), (1, False), (1, True)])
def test_new_data_of_parameters_counts(stage: int, compiled: bool) -> None:
    def run(rank, write):
        net = model()
        engine = started(net, stage)
        if compiled:
            torch._dynamo.reset()
            engine.compile(backend="aot_eager")
        for step in range(3):
            write(net, step)
            engine.backward(engine(batch(step, rank)).square().mean())
            write(net, step)
            behind = net.behind.clone() if hasattr(net, "behind") else None
            engine.step()
            if behind is not None:
                assert torch.equal(net.behind, behind)
        return state(net)

    def fn(rank):
        return {name: run(rank, write) for name, write in WRITES.items()}

    wanted = {name: plain(write, 3) for name, write in WRITES.items()}
    for found in run_ranks(2, fn):
        for name in WRITES:
            assert_close(found[name], wanted[name], name)


class Held(nn.Linear):
    """Holds its norm down in forward."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_weight_that_forward_sets_anew_stays_so(stage: int) -> None:
    def fn(rank):
        torch.manual_seed(0)
        net = nn.Sequential(Held(WIDTH, 5))
        engine = started(net, stage, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        engine.backward(0 * engine(batch(0, rank)).sum())
        engine.step()
        return float(net[0].weight.norm(dim=1).max().detach())

    assert run_ranks(2, fn) == [pytest.approx(0.1, rel=1e-4)] * 2


def test_another_shape_is_refused() -> None:
    def fn(rank):
        net = nn.Sequential(nn.Linear(5, 5))
        engine = started(net, 1)
        engine.backward(engine(torch.ones(3, 5)).sum())
        net[0].weight.data = torch.ones(5, 6)
        with pytest.raises(ShardError, match=r"'0\.weight' has the shape \(5, 6\)"):
            engine.step()

    run_ranks(2, fn)


MAKES = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_of_the_optimizer_drops_gradients(stage: int) -> None:
    def run(rank, name, drops):
        net = model()
        engine = started(net, stage, MAKES[name])
        for set_to_none in (True, False) if drops else ():
            engine.backward(100 * engine(batch(0, rank)).sum())
            engine.optimizer.zero_grad(set_to_none=set_to_none)
        engine.backward(engine(batch(1, rank)).square().sum())
        engine.step()
        return state(net)

    def fn(rank):
        return [(run(rank, name, True), run(rank, name, False)) for name in MAKES]

    for pairs in run_ranks(2, fn):
        for dropped, wanted in pairs:
            assert_close(dropped, wanted)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_optimizer_knows_the_models_parameters(stage: int) -> None:
    def fn(rank):
        net = model()
        engine = started(net, stage)
        engine.backward(engine(batch(0, rank)).square().mean())
        engine.step()
        groups = engine.optimizer.param_groups
        assert [id(p) for g in groups for p in g["params"]] == [id(p) for p in net.parameters()]
        for param in net.parameters():
            assert "exp_avg" in engine.optimizer.state[param]
        shapes = [tuple(p.shape) for p in net.parameters()]
        return shapes, [
            len(engine.optimizer.state[p]["exp_avg"].view(-1)) for p in net.parameters()
        ]

    whole = [tuple(p.shape) for p in model().parameters()]
    for shapes, states in run_ranks(2, fn):
        assert stage == 3 or shapes == whole
        assert states == ([35, 5, 15, 3] if stage == 0 else [18, 3, 8, 2])


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_group_may_be_added(stage: int) -> None:
    def fn(rank):
        net = model()
        engine = started(net, stage, lambda params: torch.optim.AdamW(net[0].parameters(), lr=0.1))
        engine.optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.01})
        for step in range(2):
            engine.backward(engine(batch(step, rank)).square().mean())
            engine.step()
        return state(net)

    net = model()
    optimizer = torch.optim.AdamW(net[0].parameters(), lr=0.1)
    optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.01})
    for step in range(2):
        net(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(2, fn):
        assert_close(found, state(net))


def test_an_optimizer_that_gives_parameters_new_data() -> None:
    class Replacing(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data = param.data - 0.1 * param.grad

    def fn(rank):
        net = model()
        engine = started(net, 1, lambda params: Replacing(params, lr=0.1))
        for step in range(2):
            engine.backward(engine(batch(step, rank)).square().mean())
            engine.step()
        return state(net)

    net = model()
    for step in range(2):
        net(batch(step)).square().mean().backward()
        with torch.no_grad():
            for param in net.parameters():
                param -= 0.1 * param.grad
                param.grad = None
    for found in run_ranks(2, fn):
        assert_close(found, state(net))


def test_a_step_that_fails_leaves_whole_parameters() -> None:
    def fn(rank):
        net = model()
        engine = started(net, 1)
        engine.backward(engine(batch(0, rank)).square().mean())
        before, step = copy.deepcopy(state(net)), engine.optimizer.step

        def fail():
            raise ValueError("no")

        engine.optimizer.step = fail
        with pytest.raises(ValueError, match="no"):
            engine.step()
        assert_close(state(net), before)
        engine.optimizer.step = step
        engine.zero_grad()
        engine.backward(engine(batch(0, rank)).square().mean())
        engine.step()
        return True

    assert run_ranks(2, fn) == [True, True]


class Momentum(nn.Module):
    """A frozen copy that follows the trained layer within forward, as in MoCo."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q, self.k, self.how = nn.Linear(5, 3), nn.Linear(5, 3).requires_grad_(False), how

    def forward(self, x):
        y = self.q(x)
        with torch.no_grad():
            for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
                if self.how == "assigned":
                    b.data = b.data * 0.9 + a.data * 0.1
                elif self.how == "written":
                    b.data.mul_(0.9).add_(a.data, alpha=0.1)
                elif self.how == "copied":
                    b.data.copy_(a.lerp(b, 0.9))
                else:
                    b.data.fill_(0.25)
        return (y - self.k(x)).square().sum()


def test_a_frozen_copy_follows_within_a_compiled_forward() -> None:
    def trained(how, stage):
        torch.manual_seed(0)
        net = Momentum(how)
        if stage is not None:
            torchloom.shard_model(net, stage=stage, persistence_threshold=0)
            torchloom.compile(net, backend="aot_eager", strict=True)
        for step in range(2):
            net(torch.full((2, 5), step + 1.0)).backward()
            with torch.no_grad():
                for param in net.q.parameters():
                    param -= 0.01 * param.grad
                    param.grad = None
        return state(net) if stage is None else full_state_dict(net)

    def fn(rank):
        for how in ("assigned", "written", "copied", "filled"):
            for stage in (1, 3):
                assert_close(trained(how, stage), trained(how, None), f"{how}, stage {stage}:")

    run_ranks(2, fn)
