"""Calls with unusual names, backends, caches and hooks."""

from __future__ import annotations

import copy
import functools
import pickle

import torch
from torch import nn

import torchloom
from support.foretold import agree

X = torch.ones(2)


def apply(x, fn, self=2):
    return fn(x) * self


@torchloom.jit(backend="eager")
def jitted(x, self=1):
    return x * self


def test_arguments_may_have_any_name() -> None:
    compiled = torch.compile(apply, backend="eager")
    assert agree(compiled, X, fn=torch.relu, self=3) == "compile"
    assert agree(compiled, X, fn=torch.relu, self=3) == "hit"
    assert torchloom.overhead(compiled, X, fn=torch.relu, self=3).num_guards > 0
    assert torchloom.explain(apply, X, fn=torch.relu, self=3).num_graphs == 1


def test_arguments_of_a_jit_may_have_any_name() -> None:
    assert jitted(x=X, self=3).tolist() == [3, 3]
    (entry,) = jitted.compiled_entries
    assert entry(x=X, self=3).tolist() == [3, 3]
    assert entry.guard(x=X, self=3)
    assert entry.guard.failure(x=X, self=3) is None
    assert entry.code(x=X, self=3).tolist() == [3, 3]


def test_a_jit_is_copied_as_functions_are() -> None:
    holder = nn.Module()
    holder.fn = jitted
    assert copy.deepcopy(jitted) is copy.copy(jitted) is jitted
    assert copy.deepcopy(holder).fn is jitted
    assert pickle.loads(pickle.dumps(jitted)) is jitted


class Particular:
    """A backend that cannot be compared with others of its kind."""

    def __call__(self, gm, example_inputs):
        return gm.forward

    def __eq__(self, other):
        if isinstance(other, Particular):
            raise RuntimeError("compared")
        return False

    __hash__ = object.__hash__


def test_a_backend_that_cannot_be_compared() -> None:
    first, second = (torch.compile(jitted._fn, backend=Particular()) for _ in range(2))
    assert [agree(first, X), agree(first, X)] == ["compile", "hit"]
    assert torchloom.explain_call(second, X).action == "recompile"


def test_a_cache_in_front_of_a_compiled_function() -> None:
    compiled = torch.compile(apply, backend="eager")
    cached = functools.lru_cache(compiled)
    assert torchloom.explain_call(cached, X, torch.relu).action == "compile"
    cached(X, torch.relu)
    assert torchloom.explain_call(cached, X, torch.relu).action == "hit"
    assert len(torchloom.entries(cached)) == 1
