"""Optimizers that see parameters whole train as in one process: one rank owns each parameter and steps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchloom
from support.optimizers import Base, Lamb, Shampoo, Soap
from support.pool import run_ranks
from torchloom.errors import EngineError
from torchloom.loop.owners import Load, add_to_least

BATCHES = 6
"""Of each step, divided among the ranks."""
STEPS = 4


class Odd(nn.Module):
    """Matrices of odd sizes, one row, one column, a stack, vectors, and a weight of two modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 7)
        self.up = nn.Linear(7, 11)
        self.square = nn.Linear(11, 11, bias=False)
        self.again = nn.Linear(11, 11, bias=False)
        self.again.weight = self.square.weight
        self.down = nn.Linear(11, 7)
        self.to_one, self.from_one = nn.Linear(7, 1, bias=False), nn.Linear(1, 7, bias=False)
        self.stack = nn.Parameter(torch.randn(3, 7, 5) / 4)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 13, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.again(torch.tanh(self.square(torch.tanh(self.up(x))))))
        x = x + self.from_one(self.to_one(x))
        x = torch.tanh(torch.einsum("bti,eio->beto", x, self.stack).sum(1))
        return nn.functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), ids.roll(1, 1).flatten()
        )


def ids_of(step: int, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + batch)
    return torch.randint(0, 13, (3, 9), generator=generator)


def loss_of(model: Any, step: int, rank: int, size: int) -> Tensor:
    share = BATCHES // size
    losses = [model(ids_of(step, batch)) for batch in range(rank * share, (rank + 1) * share)]
    return torch.stack(losses).mean()


class ScheduleFree(Base):
    """Defazio et al., arXiv 2405.15682, with SGD: averages by a number that its groups count."""

    def update(self, param, group, state):
        fast = state.setdefault("fast", param.clone())
        fast.add_(param.grad, alpha=-group["lr"])
        param.lerp_(fast, 1 / group["k"])


class Mixed(Base):
    """Rows are normed in one group, and the other one is elementwise by declaration."""

    def update(self, param, group, state):
        average = state.setdefault("average", torch.zeros_like(param)).lerp_(param.grad, 0.2)
        if not group.get("elementwise"):
            average = average / (average.flatten(1).norm(dim=1).max() + 1e-6)
        param.add_(average, alpha=-group["lr"])


class Viewing(Base):
    """As heavyball's: states in a dict under a number, a count of the elements, and a table of where parameters lie."""

    __module__ = "heavyball.like"

    def step(self, closure=None):
        self.views = {}
        for group in self.param_groups:
            group.setdefault("param_count", sum(param.numel() for param in group["params"]))
        super().step()

    def update(self, param, group, state):
        self.views[param.data_ptr()] = param, len(self.views)
        average = state.setdefault(0, {}).setdefault("average", torch.zeros_like(param))
        average.lerp_(param.grad / param.grad.norm().clamp(min=1e-6), 0.2)
        param.add_(average, alpha=-group["lr"] * group["param_count"] ** 0.25)


class Looking(Base):
    """As bitsandbytes': it finds out by their identity which parameters are of a module that it was given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self.model = model

    def update(self, param, group, state):
        given = self.model.embed.weight, self.model.down.weight, self.model.norm.weight
        grad = param.grad.sign() if any(param is each for each in given) else param.grad
        param.sub_(grad + 0.1 * param.norm(), alpha=group["lr"])


def mixed(model: nn.Module) -> list[Optimizer]:
    params = list(model.parameters())
    return [
        Mixed(
            [
                {"params": [p for p in params if p.dim() > 1]},
                {"params": [p for p in params if p.dim() < 2], "elementwise": True},
            ]
        )
    ]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    params = list(model.parameters())
    return [
        torch.optim.Muon([p for p in params if p.dim() == 2], lr=2e-2),
        torch.optim.AdamW([p for p in params if p.dim() != 2], lr=1e-2),
    ]


def adafactor(model: nn.Module) -> list[Optimizer]:
    from transformers.optimization import Adafactor

    return [Adafactor(model.parameters(), lr=1e-2, relative_step=False, scale_parameter=True)]


KINDS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "Muon and AdamW": muon_and_adamw,
    "Shampoo": lambda model: [Shampoo(model.parameters(), lr=3e-2)],
    "SOAP": lambda model: [Soap(model.parameters(), lr=3e-3)],
    "Adafactor": adafactor,
    "torch's Adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=1e-2)],
    "LAMB": lambda model: [Lamb(model.parameters())],
    "schedule-free": lambda model: [ScheduleFree(model.parameters(), lr=0.1)],
    "groups": mixed,
    "looks": lambda model: [Looking(model)],
    "views": lambda model: [Viewing(model.parameters())],
}


@contextmanager
def newton_schulz_in_fp32() -> Iterator[None]:
    """Let Muon iterate in fp32: one flipped rounding of bf16 is 4e-3 of an element, whatever else is equal."""
    from torch.optim import _muon

    def iterate(grad: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
        a, b, c = coefficients
        x = grad.T if grad.shape[0] > grad.shape[1] else grad
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if grad.shape[0] > grad.shape[1] else x

    with mock.patch.object(_muon, "_zeropower_via_newtonschulz", iterate):
        yield


def train(
    model: nn.Module, optimizers: list[Optimizer], rank: int, size: int, first: int = 0
) -> list[float]:
    """Train in a loop that clips; return the norms."""
    norms = []
    for step in range(first, first + STEPS):
        loss_of(model, step, rank, size).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.7).item())
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return norms


def in_one_process(kind: str) -> tuple[dict[str, Tensor], list[float]]:
    model = Odd()
    with newton_schulz_in_fp32():
        norms = train(model, KINDS[kind](model), 0, 1)
    return {name: value.detach().clone() for name, value in model.named_parameters()}, norms


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=1e-5,
            atol=1e-5,
            msg=lambda text, name=name: f"{what} {name} {text}",
        )


def _stages(kind: str, size: int) -> tuple[int, ...]:
    """Return the stages to try: all of one kind, and for the others those whose steps differ most."""
    if kind in ("Muon and AdamW", "LAMB"):
        return 1, 2, 3
    return (1, 3) if size == 2 else (3,)


@pytest.mark.parametrize("size", [2, 3])
def test_equal_to_one_process(size: int) -> None:
    expected = {kind: in_one_process(kind) for kind in KINDS}

    def fn(rank: int):
        held = {}
        for kind, make in KINDS.items():
            for stage in _stages(kind, size):
                model = torchloom.shard_model(Odd(), stage, persistence_threshold=0)
                optimizers = make(model)
                with newton_schulz_in_fp32():
                    norms = train(model, optimizers, rank, size)
                weights, known = expected[kind]
                assert_near(model.state_dict(), weights, (kind, stage))
                torch.testing.assert_close(norms, known, rtol=1e-5, atol=1e-6)
                held[kind, stage] = {
                    name: sum(
                        value.numel()
                        for each in optimizers
                        for value in each.state.get(param, {}).values()
                        if isinstance(value, Tensor) and value.dim() > 0
                    )
                    for name, param in model.named_parameters()
                }
        return held

    results = run_ranks(size, fn)
    for stage in (1, 2, 3):
        owners = [
            [bool(each["LAMB", stage][n]) for each in results] for n in ("up.weight", "stack")
        ]
        assert [sum(each) for each in owners] == [1, 1]  # one rank has the states, the others none
        elements = [sum(each["LAMB", stage].values()) for each in results]
        assert max(elements) < 1.4 / size * sum(elements)


class Lookahead(Optimizer):
    """Wraps another optimizer, and pulls weights back every three steps."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.count = base, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.base.param_groups, self.base.state = self.param_groups, self.state
        self.base.step()
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.clone())
                if self.count % 3 == 0:
                    param.copy_(slow.lerp_(param, 0.5))


def test_states_are_whole_in_files_of_any_number_of_ranks_and_stage(tmp_path) -> None:
    """An optimizer inside of another one, too: the outer one's step is the one that counts."""

    def make(model: nn.Module) -> Optimizer:
        return Lookahead(Shampoo(model.parameters(), lr=3e-2))

    plain = Odd()
    expected = make(plain)
    train(plain, [expected], 0, 1)
    file = {"weights": plain.state_dict(), "states": expected.state_dict()}
    torch.save(file, tmp_path / "run.pt")
    expected.count = 0
    train(plain, [expected], 0, 1, first=STEPS)

    def fn(rank: int, size: int, stage: int):
        stored = torch.load(tmp_path / "run.pt", weights_only=True)
        model = torchloom.shard_model(Odd(), stage, persistence_threshold=0)
        model.load_state_dict(stored["weights"])
        optimizer = make(model)
        if rank == 0:  # the other ranks' are sorted out at the first step
            torchloom.shard.whole_states(optimizer)
        optimizer.load_state_dict(stored["states"])
        train(model, [optimizer], rank, size, first=STEPS)
        return model.state_dict(), optimizer.state_dict()["state"]

    for size, stage in ((2, 1), (2, 3), (3, 3)):
        for weights, states in run_ranks(size, fn, size, stage):
            assert_near(weights, dict(plain.named_parameters()), (size, stage))
            for index, state in expected.state_dict()["state"].items():
                assert_near(states[index], state, (size, stage, index))


def test_a_step_that_raises_leaves_shards() -> None:
    class Raises(Shampoo):
        def update(self, param, group, state):
            super().update(param, group, state)
            if self.fails:
                raise KeyError("on purpose")

    def fn(rank: int):
        model = torchloom.shard_model(Odd(), 3, persistence_threshold=0)
        optimizer = Raises(model.parameters())
        optimizer.fails = True
        loss_of(model, 0, rank, 2).backward()
        with pytest.raises(KeyError):
            optimizer.step()
        optimizer.fails = False
        optimizer.step()
        optimizer.zero_grad()

        def closure():  # sees shards
            loss = loss_of(model, 1, rank, 2)
            loss.backward()
            return loss

        optimizer.step(closure)
        return model.state_dict()

    first, second = run_ranks(2, fn)
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert value.isfinite().all()


def test_two_copies_of_the_weights() -> None:
    """Hybrid sharding: the ranks of each copy own, step and save alike."""
    plain = Odd()
    expected = Lamb(plain.parameters())
    for step in range(2):
        loss_of(plain, step, 0, 1).backward()
        expected.step()
        expected.zero_grad()

    def fn(rank: int):
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
        model = torchloom.shard_model(Odd(), 3, mesh, persistence_threshold=0)
        optimizer = Lamb(model.parameters())
        for step in range(2):
            share = [ids_of(step, batch) for batch in (2 * rank % 6, (2 * rank + 1) % 6)]
            factor = 4 / 3 if rank < 3 else 0.0  # six batches on four ranks
            (torch.stack([model(ids) for ids in share]).mean() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), optimizer.state_dict()["state"]

    for weights, states in run_ranks(4, fn):
        assert_near(weights, dict(plain.named_parameters()), "hybrid")
        for index, state in expected.state_dict()["state"].items():
            assert_near(states[index], state, index)


class GlobalNorm(Base):
    """Scales all steps by a norm over all gradients, which it keeps in a place of its own."""

    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.factor = 1 / (1 + float(torch.stack([grad.norm() for grad in grads]).norm()))
        super().step()

    def update(self, param, group, state):
        param.add_(param.grad, alpha=-group["lr"] * self.factor)


class GlobalRate(Base):
    """As Prodigy, under another name: one step size of all parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            sums = [p.grad.abs().sum() for p in group["params"] if p.grad is not None]
            group["sum"] = group.get("sum", 0.0) + float(torch.stack(sums).sum())
        super().step()

    def update(self, param, group, state):
        param.add_(param.grad, alpha=-group["lr"] / group["sum"])


def test_numbers_of_all_parameters_are_found_at_the_first_step() -> None:
    def fn(rank: int):
        for kind in (GlobalNorm, GlobalRate):
            model = torchloom.shard_model(Odd(), 3, persistence_threshold=0)
            optimizer = kind(model.parameters())
            loss_of(model, 0, rank, 2).backward()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            with pytest.raises(EngineError, match="keeps numbers that differ between ranks"):
                optimizer.step()
            for name, value in model.state_dict().items():
                assert torch.equal(value, before[name])

    run_ranks(2, fn)


def test_owners_have_equal_shares() -> None:
    """A decoder of eight layers on up to eight ranks: within a tenth, of memory and of products."""
    layer = [(1024, 1024), (256, 1024), (256, 1024), (1024, 1024)]
    layer += [(3584, 1024), (3584, 1024), (1024, 3584)]
    found = sorted((Load.of(shape) for shape in 8 * layer), reverse=True)
    for size in range(2, 9):
        loads = [Load(0, 0)] * size
        for each in found:
            add_to_least(loads, each)
        for of_rank in zip(*loads, strict=True):
            assert max(of_rank) <= 1.1 * sum(of_rank) / size, (size, of_rank)
