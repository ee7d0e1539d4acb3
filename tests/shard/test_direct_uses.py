"""Parameters that a loss uses themselves, beside their modules: equal to one process, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchloom
from support.pool import run_ranks
from support.runs import SGD, sharded
from torchloom.errors import AgreementError, ShardError

Term = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """Odd sizes, one of them a single number; with a term of its own parameters inside of forward."""

    def __init__(self, term: Term | None = None, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.term, self.is_checkpointed = term, is_checkpointed

    def body(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x * self.scale)))
        if self.term is not None:
            y = y.square().mean() + self.term(self, x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return (
            checkpoint(self.body, x, use_reentrant=False) if self.is_checkpointed else self.body(x)
        )


def total(model: nn.Module, x: Tensor) -> Tensor:
    return 0.1 * sum(p.square().sum() for p in model.parameters())


def stacked(model: nn.Module, x: Tensor) -> Tensor:
    return 0.1 * torch.stack([(p - 0.5).abs().pow(3).sum() for p in model.parameters()]).sum()


def flat(model: nn.Module, x: Tensor) -> Tensor:
    parts = [p.view(-1) for name, p in model.named_parameters() if name != "scale"]
    return torch.cat(parts).square().sum() / 10


def weighed(model: nn.Module, x: Tensor) -> Tensor:
    return x.mean() * sum(p.square().sum() for p in model.parameters())


def norms(model: nn.Module, x: Tensor) -> Tensor:
    return 0.1 * sum(p.norm() for p in model.parameters())


def root(model: nn.Module, x: Tensor) -> Tensor:
    return sum(p.square().sum() for p in model.parameters()).sqrt()


def squared(model: nn.Module, x: Tensor) -> Tensor:
    found = 0.1 * sum(p.square().sum() for p in model.parameters())
    return found * found


def product(model: nn.Module, x: Tensor) -> Tensor:
    return sum(p.square().sum() for p in model.parameters()) * model.first(x).mean()


def scaled(model: nn.Module, x: Tensor) -> Tensor:
    return sum((x.mean() * p).square().sum() for p in model.parameters())


RIGHT = [total, stacked, flat, weighed]
WRONG = [norms, root, squared, product, scaled]


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def alone(term: Term, *, num: int = 2) -> dict[str, Tensor]:
    """Return the weights after three steps over the ranks' rows by one process."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(num):
            x = rows(rank, step)
            ((model(x).square().mean() + term(model, x)) / num).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def on_ranks(
    term: Term,
    stage: int,
    *,
    door: str,
    backend: str | None,
    inside: bool = False,
    is_checkpointed: bool = False,
) -> list[dict[str, Tensor] | str]:
    """Return each rank's weights after the same steps on two ranks, or its error."""

    def fn(rank: int) -> dict[str, Tensor] | str:
        torch.manual_seed(0)
        model: Any = Net(term if inside else None, is_checkpointed=is_checkpointed)
        if door == "engine":
            engine = sharded(model, stage, batch=4, optimizer=SGD, backend=backend)
            call, backward, step = engine, engine.backward, engine.step
        else:
            torchloom.shard_model(model, stage=stage, persistence_threshold=0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if backend is not None:
                torchloom.compile(model, backend=backend)
            call, backward = model, torch.Tensor.backward

            def step() -> None:
                optimizer.step()
                optimizer.zero_grad()

        try:
            for index in range(3):
                x = rows(rank, index)
                found = call(x)
                backward(found if inside else found.square().mean() + term(model, x))
                step()
        except ShardError as error:
            return str(error)
        return torchloom.shard.full_state_dict(model)

    return run_ranks(2, fn)


@pytest.mark.parametrize(
    ("stage", "door", "backend"),
    [
        (1, "engine", "aot_eager"),
        (3, "engine", None),
        (3, "engine", "aot_eager"),
        (3, "own loop", None),
    ],
)
@pytest.mark.parametrize("term", RIGHT, ids=lambda each: each.__name__)
def test_sums_beside_modules_train_as_in_one_process(term, stage, door, backend) -> None:
    expected = alone(term)
    for found in on_ranks(term, stage, door=door, backend=backend):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("term", WRONG, ids=lambda each: each.__name__)
def test_what_sees_one_part_is_refused_and_is_right_on_whole_ones(term, backend) -> None:
    for told in on_ranks(term, 3, door="own loop", backend=backend):
        assert "of which this rank holds one part" in told
        assert re.search("from the parameter '(first|second|scale)", told)
    expected = alone(term)
    for found in on_ranks(term, 1, door="own loop", backend=backend):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("term", [total, norms, squared], ids=lambda each: each.__name__)
def test_terms_inside_of_forward(term, backend, is_checkpointed) -> None:
    options = {"door": "engine", "backend": backend, "inside": True}
    expected = alone(term)
    for found in on_ranks(term, 3, is_checkpointed=is_checkpointed, **options):
        if term is total:
            torch.testing.assert_close(found, expected)
        else:
            assert "of which this rank holds one part" in found
    for found in on_ranks(term, 1, is_checkpointed=is_checkpointed, **options):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("door", ["engine", "own loop"])
def test_a_head_that_the_loss_applies_itself(door, backend) -> None:
    """As fused losses do: its gradient is of this rank's rows, and is averaged."""

    def head(model: nn.Module, x: Tensor) -> Tensor:
        weight = dict(model.named_parameters())["second.weight"]
        return F.linear(torch.tanh(model.first(x)), weight).square().mean()

    expected = alone(head)
    for found in on_ranks(head, 1, door=door, backend=backend):
        torch.testing.assert_close(found, expected)


def test_after_a_refusal_the_same_graph_trains() -> None:
    def fn(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = torchloom.shard_model(Net(), stage=3, persistence_threshold=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = rows(rank, step)
            loss = model(x).square().mean() + total(model, x)
            with pytest.raises(ShardError, match="holds one part"):
                (loss + norms(model, x)).backward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torchloom.shard.full_state_dict(model)

    for found in run_ranks(2, fn):
        torch.testing.assert_close(found, alone(total))


def test_a_term_on_one_rank_alone_is_an_error_on_both() -> None:
    def fn(rank: int) -> str:
        torch.manual_seed(0)
        model = torchloom.shard_model(Net(), stage=1)
        torchloom.compile(model, backend="aot_eager")
        try:
            for step in range(6):
                x = rows(rank, step)
                loss = model(x).square().mean()
                (loss + total(model, x) if rank == 0 else loss).backward()
        except AgreementError as error:
            return str(error)
        return ""

    for told in run_ranks(2, fn):
        assert "run different programs" in told
