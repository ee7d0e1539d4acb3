"""A forward pass that raises and is caught on all ranks leaves nothing that a later one takes for its own."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import torchloom
from support.pool import run_ranks
from support.runs import micro_step, settings

WIDTH = 16


@torch.library.custom_op("aborted::check", mutates_args=())
def check(x: torch.Tensor) -> torch.Tensor:
    if bool(x.isnan().any()):
        raise ValueError("bad batch")
    return x.clone()


check.register_fake(torch.empty_like)
check.register_autograd(lambda ctx, grad: grad)


class Tied(nn.Module):
    """Checks its input in the graph, and stops between two uses of a tied weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.c.weight = self.a.weight
        self.stops: BaseException | None = None

    def forward(self, x):
        x = self.b(self.a(check(x))).tanh()
        if self.stops is not None:
            raise self.stops
        return self.c(x).square().mean()


def batch(rank, step):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("stops", [KeyboardInterrupt, SystemExit, ValueError])
def test_tied_weights_are_gathered_anew(stage, stops) -> None:
    def fn(rank, aborts):
        torch.manual_seed(0)
        model = Tied()
        engine = torchloom.initialize(model=model, config=settings(stage))[0]
        losses = []
        for step in range(5):
            if aborts and step == 2:
                model.stops = stops()
                with pytest.raises(stops):
                    engine(batch(rank, step))
                model.stops = None
            losses.append(micro_step(engine, batch(rank, step)))
        return losses

    assert run_ranks(2, fn, True) == run_ranks(2, fn, False)


def test_a_pass_inside_of_a_pass_keeps_what_the_outer_one_has() -> None:
    class Nested(Tied):
        def forward(self, x, again=True):
            first = self.a(x)
            inner = self(x, again=False) if again else 0.0
            return self.c(first).square().mean() + inner

    def fn(rank, stage):
        torch.manual_seed(0)
        engine = torchloom.initialize(model=Nested(), config=settings(stage))[0]
        return [micro_step(engine, batch(rank, step)) for step in range(3)]

    for losses, expected in zip(run_ranks(2, fn, 3), run_ranks(2, fn, 0), strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_compiled_weights_are_not_read_before_they_are_written(shared) -> None:
    """Rank 1 steps late; after the error a rank took an old signal of it for the new one."""

    def fn(rank, aborts):
        torch.manual_seed(0)
        config = {**settings(3), "compile": {"symmetric_memory": shared}}
        engine = torchloom.initialize(model=Tied(), config=config)[0]
        engine.compile(backend="aot_eager")
        if rank == 1:
            engine.optimizer.register_step_pre_hook(lambda *_: time.sleep(0.3))
        losses = []
        for step in range(6):
            x = batch(rank, step)
            if aborts and step == 2:
                with pytest.raises(ValueError, match="bad batch"):
                    engine(x * float("nan"))
            losses.append(micro_step(engine, x))
        return losses

    assert run_ranks(2, fn, True) == run_ranks(2, fn, False)
