"""Several models of one process whose parameters have the same names."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import torchloom
from support.pool import run_ranks
from support.runs import SGD, sharded
from torchloom.shard import layout_of

WIDTH = 10


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight  # tied weights are remembered in the course of a forward
    return model


class Student(nn.Module):
    """Calls its teacher inside its own forward; both have a `body` of equal names and sizes."""

    def __init__(self, teacher: nn.Module | None, seed: int) -> None:
        super().__init__()
        self.body = make_model(seed)
        self.__dict__["teacher"] = teacher  # not a child: its weights are not ours

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.body(x)
        teacher = self.__dict__["teacher"]
        if teacher is None:
            return own
        return (own - teacher(x).detach()).square().mean()


def batch() -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


def plain() -> float:
    loss = Student(Student(None, seed=2), seed=1)(batch())
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("has_engines", [False, True])
def test_one_inside_the_other_has_its_own_weights(has_engines: bool, is_compiled: bool) -> None:
    def fn(rank):
        def cut(model):
            if has_engines:
                return sharded(model, optimizer=SGD, backend="eager" if is_compiled else None)
            model = torchloom.shard_model(model, stage=3, persistence_threshold=0)
            if is_compiled:
                torchloom.compile(model, backend="eager")
            return model

        teacher = cut(Student(None, seed=2))
        student = cut(Student(teacher, seed=1))
        loss = student(batch())
        student.backward(loss) if has_engines else loss.backward()
        return float(loss.detach())

    for loss in run_ranks(2, fn):
        assert loss == pytest.approx(plain(), rel=1e-6)


def test_engines_count_their_own_communication() -> None:
    def fn(rank):
        engines = [sharded(Student(None, seed), optimizer=SGD) for seed in (1, 2)]
        before = [engine.comm_stats() for engine in engines]
        engines[1](batch())
        after = [engine.comm_stats() for engine in engines]
        return [b.num_collectives - a.num_collectives for a, b in zip(before, after, strict=True)]

    for counted in run_ranks(2, fn):
        assert counted[0] == 0
        assert counted[1] > 0


def test_ranks_that_freed_an_earlier_model_at_different_times_agree() -> None:
    def fn(rank):
        gc.collect()
        first = torchloom.shard_model(make_model(1), persistence_threshold=0)
        if rank == 1:
            del first  # rank 0 still has it
            gc.collect()
        second = torchloom.shard_model(make_model(2), persistence_threshold=0)
        return layout_of(second).handle, second(batch()).sum().item()

    results = run_ranks(2, fn)
    assert len(set(results)) == 1
    assert "model2" in results[0][0]
