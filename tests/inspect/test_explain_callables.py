"""Calls of what is no plain function: partials, callable objects, modules, decorated functions."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import torchloom
from support.foretold import agree

X = torch.ones(2)


def add(x, y=1):
    return x + y


class Callee:
    def __init__(self, scale: int) -> None:
        self.scale = scale

    def __call__(self, x, *, shift=0):
        return x * self.scale + shift


@pytest.mark.parametrize(
    ("make", "kwargs"),
    [
        (lambda: functools.partial(add, y=3), {}),
        (lambda: functools.partial(functools.partial(add), y=2), {}),
        (lambda: functools.partial(Callee(3), shift=5), {}),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {}),
        (lambda: torch.sin, {}),
    ],
)
def test_what_is_no_plain_function(make, kwargs) -> None:
    given = make()
    compiled = torch.compile(given, backend="eager")
    assert torchloom.entries(compiled) == []
    assert agree(compiled, X, **kwargs) in ("compile", "recompile")
    assert agree(compiled, X, **kwargs) == "hit"
    assert len(torchloom.entries(compiled)) == 1
    assert agree(compiled, torch.ones(3, 2), **kwargs) == "recompile"
    if given is not torch.sin:
        assert len(torchloom.entries(given)) == len(torchloom.entries(compiled)) >= 1
        assert torchloom.explain(given, X, **kwargs).num_graphs == 1


def test_methods_that_are_compiled_in_their_class() -> None:
    class Owner:
        factor = 3.0

        @torch.compile(backend="eager")
        def plain(self, x, shift=0):
            return x * self.factor + shift

        @torchloom.jit(backend="eager")
        def jitted(self, x, shift=0):
            return x * self.factor + shift

        @staticmethod
        @torch.compile(backend="eager")
        def static(x):
            return x + 1

    owner = Owner()
    for method in (owner.plain, owner.jitted, owner.static):
        assert [agree(method, X), agree(method, X)] == ["compile", "hit"]
        assert len(torchloom.entries(method)) == 1
    assert agree(functools.partial(owner.jitted, shift=2.5), X) == "recompile"
    partial = functools.partial(torch.compile(add, backend="eager"), y=2.5)
    assert [agree(partial, X), agree(partial, X)] == ["compile", "hit"]
    assert torchloom.overhead(partial, X).num_guards > 0
    assert torchloom.explain(partial, X).num_graphs == 1
