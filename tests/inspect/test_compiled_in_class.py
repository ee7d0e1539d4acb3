"""`torch.compile` in a class body, asked through an instance of the class."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import torchloom
from support.foretold import agree

X, Y = torch.ones(2), torch.ones(3)


def decorate(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


class Compiled(nn.Module):
    @torch.compile(backend="eager")
    def forward(self, x):
        return x + 1


class Inherited(Compiled):
    pass


class Jitted(nn.Module):
    @torchloom.jit(backend="eager")
    def forward(self, x):
        return x + 2


class Decorated(nn.Module):
    @decorate
    @torch.compile(backend="eager")
    def forward(self, x):
        return x + 3


class Callee:
    @torch.compile(backend="eager")
    def __call__(self, x):
        return x + 4


class JittedCallee:
    @torchloom.jit(backend="eager")
    def __call__(self, x):
        return x + 5


class OwnCall(nn.Module):
    @torch.compile(backend="eager")
    def __call__(self, x):
        return x + 6


@pytest.mark.parametrize(
    "cls", [Compiled, Inherited, Jitted, Decorated, Callee, JittedCallee, OwnCall]
)
def test_an_instance_is_asked(cls) -> None:
    each = cls()
    assert torchloom.entries(each) == []
    assert [agree(each, X), agree(each, X), agree(each, Y)] == ["compile", "hit", "recompile"]
    assert len(torchloom.entries(each)) == 2
    assert torchloom.overhead(each, X).num_guards > 0
    explained = torchloom.explain(each, X)
    assert explained.num_graphs == 1
    assert not any("eval_frame" in f.file for f in explained.record.all_functions())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="as a decorator, torch.compile drops it")
def test_the_limit_of_a_forward_that_is_compiled_in_its_class() -> None:
    class Model(nn.Module):
        @torch.compile(backend="eager", recompile_limit=1, dynamic=False)
        def forward(self, x):
            return x + 1

    model = Model()
    assert agree(model, X) == "compile"
    told = torchloom.explain_call(model, Y)
    assert (told.action, told.limit) == ("eager", 1)
    model(Y)
    assert agree(model, Y) == "eager"
