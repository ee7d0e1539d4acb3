"""Functions with free variables: torch makes what follows their graph breaks through a factory."""

from __future__ import annotations

import torch
from torch import nn

import torchloom
from support.foretold import agree

X = torch.ones(2)


def branching():
    scale = 2.0

    def fn(x):
        x = x * scale
        if x.sum() > 0:
            return x + scale
        return x - scale

    return fn


class Base(nn.Module):
    def forward(self, x):
        return x + 1


class WithSuper(Base):
    def forward(self, x):
        x = x * 2
        if x.sum() > 0:
            return super().forward(x)
        return x - 1


def test_calls_of_a_method_that_calls_super() -> None:
    compiled = torch.compile(WithSuper(), backend="eager")
    assert [agree(compiled, X), agree(compiled, X)] == ["compile", "hit"]


def test_entries_behind_breaks_of_a_closure() -> None:
    fn = branching()
    compiled = torch.compile(fn, backend="eager")
    compiled(X)
    whole, rest = torchloom.entries(compiled, resume=True)
    assert (whole.depth, rest.depth) == (0, 1)
    assert rest.function.startswith("torch_dynamo_resume_in_fn")
    first = fn.__code__.co_firstlineno
    assert [each.line for each in whole.continuations] == [first + 3, first + 4]
    assert all(each.function.startswith("torch_dynamo_resume") for each in whole.continuations)
    assert [each.num_entries for each in whole.continuations] == [1, 0]
    for each in whole.continuations:
        assert "FunctionType" not in each.source


def test_the_source_of_a_jitted_closure() -> None:
    compiled = torchloom.jit(branching(), backend="eager")
    compiled(X)
    (entry,) = compiled.compiled_entries
    assert "x + scale" in entry.code.source
    assert "x - scale" in entry.code.source
    assert "_make_fn" not in entry.code.source
    assert torch.equal(entry(-X), X * -4)


def test_a_record_shows_what_follows_in_a_closure() -> None:
    with torchloom.watch() as w:
        compiled = torch.compile(branching(), backend="eager")
        compiled(X), compiled(X)
    (entry,) = w["branching.<locals>.fn"].entries
    assert [each.function.partition("_at_")[0] for each in entry.continuations] == [
        "torch_dynamo_resume_in_fn"
    ] * 2


def test_calls_of_a_closure_that_breaks_at_once_are_counted() -> None:
    shift = 1.0

    def fn(x):
        print(end="")
        return x + shift

    compiled = torch.compile(fn, backend="eager")
    with torchloom.watch() as w:
        for _ in range(3):
            compiled(X)
    (function,) = w.record.functions
    (entry,) = function.entries
    assert (entry.is_counted, entry.num_hits) == (True, 3)
    assert [child.name.startswith("torch_dynamo_resume") for child in function.children] == [True]
