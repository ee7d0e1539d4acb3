"""A watch asks nothing of the objects of the program: it reads their types."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import torchloom
from torchloom.inspect.live.naming import name_of, named

X = torch.ones(2)
ASKED: list[str] = []


class Asked:
    def __call__(self, x):
        return x + 1

    def __getattr__(self, name):
        ASKED.append(name)
        raise AttributeError(name)


class AlwaysAsked(Asked):
    def __getattribute__(self, name):
        ASKED.append(name)
        return object.__getattribute__(self, name)


class AskedModule(nn.Module):
    def forward(self, x):
        return x + 1

    def __getattr__(self, name):
        ASKED.append(name)
        return super().__getattr__(name)


class InClass(nn.Module):
    @torch.compile(backend="eager")
    def forward(self, x):
        return x + 2


def asked_in(make, watched: bool) -> list[str]:
    torch._dynamo.reset()
    compiled = torch.compile(make(), backend="eager")
    ASKED.clear()
    if watched:
        with torchloom.watch():
            compiled(X)
    else:
        compiled(X)
    return list(ASKED)


@pytest.mark.parametrize("make", [AlwaysAsked, AskedModule])
def test_a_watch_asks_no_more_than_torch(make) -> None:
    assert asked_in(make, watched=True) == asked_in(make, watched=False)


@pytest.mark.parametrize("make", [Asked, AlwaysAsked])
def test_names_are_read_from_types(make) -> None:
    each = make()
    ASKED.clear()
    assert name_of(each) == make.__qualname__
    assert name_of(functools.partial(each)) == f"partial({make.__qualname__})"
    found = named(each)
    assert (found.name, found.line) == (
        make.__qualname__,
        Asked.__call__.__code__.co_firstlineno,
    )
    assert ASKED == []


def test_the_place_of_a_forward_that_its_class_holds_compiled() -> None:
    with torchloom.watch() as w:
        torch.compile(InClass(), backend="eager")(X)
    assert not any("eval_frame" in each.file for each in w.record.all_functions())


def test_names_of_routines_and_classes() -> None:
    assert name_of(len) == "len"
    assert name_of(torch.sin) == "sin"
    assert name_of(str.upper) == "str.upper"
    assert name_of(Asked) == "Asked"
    assert name_of(Asked().__call__) == "Asked.__call__"
    assert name_of(functools.wraps(asked_in)(Asked())) == "asked_in"
