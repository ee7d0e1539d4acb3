"""Loops of one's own under a budget: whoever updates weights, in whatever way, compiled code reads them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import torchloom
from support.models import Deep
from support.pool import run_ranks
from torchloom.errors import AgreementError

CONFIG = {
    "compile": {"backend": "aot_eager", "memory_budget": 10**9, "replan_step": 0},
    "gradient_accumulation_steps": 1,
}


def sharded() -> nn.Module:
    torch.manual_seed(0)
    return torchloom.shard_model(Deep(), persistence_threshold=100)


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5 + 2 * rank + step, 37, generator=generator)  # ragged


class Wrapper:
    """Like the optimizers of frameworks: no torch optimizer, and its steps are another one's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self) -> None:
        self.optimizer.step()


def by_hand(model, optimizer) -> None:
    for param in model.parameters():
        param.data -= 0.5 * param.grad


UPDATES = {
    "fused": lambda model, optimizer: optimizer.step(),
    "by hand": by_hand,
    "foreach": lambda model, optimizer: torch._foreach_add_(
        [p.data for p in model.parameters()], [p.grad for p in model.parameters()], alpha=-0.5
    ),
}


def losses(rank: int, update: str, config, accumulation: int):
    model = sharded()
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.5, fused=True))
    if config:
        session = torchloom.compile(model, config=config, optimizer=optimizer)  # type: ignore[arg-type]
    found = []
    for step in range(4):
        for micro in range(accumulation):
            loss = model(batch(3 * step + micro, rank)).square().mean()
            loss.backward()
            found.append(loss.item())
        UPDATES[update](model, optimizer)
        for param in model.parameters():
            param.grad = None
    return found, [len(graph.resident) for graph in session.plan().graphs] if config else []


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("update", UPDATES)
def test_updates_that_leave_no_trace_are_read(update: str, accumulation: int) -> None:
    config = {**CONFIG, "gradient_accumulation_steps": accumulation}
    wanted = run_ranks(2, losses, update, None, accumulation, timeout_s=200)
    found = run_ranks(2, losses, update, config, accumulation, timeout_s=200)
    for (own, residents), (eager, _) in zip(found, wanted, strict=True):
        assert residents[0] > 0
        assert own == pytest.approx(eager, rel=1e-5)
        assert len(set(own)) == len(own)
    assert found[0][0][-1] < found[0][0][0]


def moved_by(rank: int, wraps: bool):
    """Return how many graphs were compiled before and after the step that the schedule names."""
    model = sharded()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = [[0, ["zero3_compile"]], [2, ["zero3_compile", ["prefetch", {"max_bytes": 0}]]]]
    session = torchloom.compile(
        model,
        config={"compile": {"backend": "aot_eager", "schedule": schedule}},
        optimizer=Wrapper(own) if wraps else None,  # type: ignore[arg-type]
    )
    counts = []
    for step in range(4):
        model(torch.ones(3, 37)).square().mean().backward()
        own.step()
        own.zero_grad()
        if step == 1:  # another optimizer over the same parameters goes on
            own = torch.optim.SGD(model.parameters(), lr=0.05)
        counts.append(len(session.report.graphs))
    kept = weakref.ref(model)
    del model, own
    gc.collect()
    return counts, kept() is None


@pytest.mark.parametrize("wraps", [True, False])
def test_steps_of_whoever_steps_the_parameters_move_the_schedule(wraps: bool) -> None:
    assert run_ranks(2, moved_by, wraps, timeout_s=200) == [([1, 1, 2, 2], True)] * 2


def one_alone(rank: int):
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        AgreementError, match=r"optimizer: ranks \[0\]: \[\]; ranks \[1\]: \[\"SGD\"\]"
    ):
        torchloom.compile(model, optimizer=optimizer if rank else None)
    return True


def test_an_optimizer_on_one_rank_alone_is_told() -> None:
    assert run_ranks(2, one_alone, timeout_s=200) == [True, True]
