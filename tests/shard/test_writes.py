"""What forward writes into a gathered weight is refused, not lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchloom
from support.pool import run_ranks
from support.runs import settings
from torchloom.errors import ShardError

WIDTH = 6


class Layer(nn.Module):
    """A linear layer whose forward does something to its weight first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def touch(self) -> None: ...

    def forward(self, x):
        self.touch()
        return F.linear(x, self.weight, self.bias).square().mean()


class Clamps(Layer):
    @torch.no_grad()
    def touch(self):
        self.weight.clamp_(-0.5, 0.5)


class Indexes(Layer):
    @torch.no_grad()
    def touch(self):
        self.weight[0] = 0.0


class Initializes(Layer):
    def touch(self):
        nn.init.zeros_(self.bias)


class Foreach(Layer):
    @torch.no_grad()
    def touch(self):
        torch._foreach_mul_([self.weight, self.bias], 0.5)


class Views(Layer):
    def touch(self):
        self.weight.detach().view(-1)[:3].zero_()


class DataIsAssigned(Layer):
    def forward(self, x):
        self.weight.data = F.normalize(self.weight.data)
        return F.linear(x, self.weight, self.bias).square().mean()


class DataIsWritten(Layer):
    def forward(self, x):
        self.weight.data.clamp_(-0.5, 0.5)
        return F.linear(x, self.weight, self.bias).square().mean()


SEEN_WHEN_RUN = [Clamps, Indexes, Initializes, Foreach, Views]
SEEN_AT_ONCE = [DataIsAssigned, DataIsWritten]


class Innocent(Layer):
    """Writes into values that it made of weights, and into buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        weight = self.weight.float().clone()
        with torch.no_grad():
            self.seen += 1
        weight = weight * 2
        weight.clamp_(-0.5, 0.5)
        norm = self.weight.data.requires_grad_(False).norm()
        x = F.linear(x, weight, self.bias) * 2.0
        x[0] = 0.0
        x /= 1 + norm
        return x.square().mean()


def told(kind, stage, compiled, small) -> str:
    torch.manual_seed(0)
    config = settings(stage)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 10**6 if small else 0
    try:
        engine = torchloom.initialize(model=nn.Sequential(kind()), config=config)[0]
        if compiled:
            engine.compile(backend="aot_eager")
        for _ in range(2):
            engine.backward(engine(torch.randn(3, WIDTH)))
            engine.step()
    except ShardError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_write_is_refused(stage: int, compiled: bool) -> None:
    small = stage == 2  # averaged whole parameters are copies as well

    def fn(rank):
        found = {}
        for kind in (*SEEN_WHEN_RUN, *SEEN_AT_ONCE):
            torch._dynamo.reset()
            found[kind.__name__] = told(kind, stage, compiled, small)
        return found

    for found in run_ranks(2, fn):
        for name, text in found.items():
            which = "bias" if name == "Initializes" else "0."
            assert text.startswith("forward writes into the weight") and which in text, (name, text)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_made_of_a_weight_may_be_written(compiled: bool) -> None:
    def fn(rank):
        return [told(Innocent, stage, compiled, False) for stage in (0, 1, 2, 3)]

    assert run_ranks(2, fn) == [["done"] * 4] * 2


def test_whole_parameters_may_be_written() -> None:
    def fn(rank):
        return [told(kind, 1, False, False) for kind in (Clamps, DataIsAssigned)]

    assert run_ranks(2, fn) == [["done"] * 2] * 2


def test_evaluation_in_inference_mode_works() -> None:
    def fn(rank):
        torch.manual_seed(0)
        config = settings(3)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        engine = torchloom.initialize(model=nn.Sequential(Innocent()), config=config)[0]
        found = []
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                found.append(float(engine(torch.ones(3, WIDTH)).detach()))
        return found

    for found in run_ranks(2, fn):
        assert len(set(found)) == 1
