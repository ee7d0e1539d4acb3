"""Functions with free variables: torch makes what follows their graph breaks through a factory."""

from __future__ import annotations

import torch

import torchloom

X = torch.ones(2)


def branching():
    scale = 2.0

    def fn(x):
        x = x * scale
        if x.sum() > 0:
            return x + scale
        return x - scale

    return fn


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
