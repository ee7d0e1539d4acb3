"""Calls with unusual names, backends, caches and hooks."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

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
    told = torchloom.explain_call(cached, X, torch.relu)
    assert (told.action, told.is_certain) == ("compile", False)
    cached(X, torch.relu)
    told = torchloom.explain_call(cached, X, torch.relu)
    assert (told.action, told.is_certain) == ("hit", False)  # or what the cache holds
    assert len(torchloom.entries(cached)) == 1


def test_a_function_that_is_not_compiled_is_told_with_doubt() -> None:
    disabled = torch.compile(apply, disable=True)  # the function itself
    for fn in (apply, disabled, torch.compile(nn.Linear(2, 2), disable=True)):
        args = (X,) if isinstance(fn, nn.Module) else (X, torch.relu)
        assert not torchloom.explain_call(fn, *args).is_certain


class Net(nn.Module):
    def forward(self, x):
        return x + 1


@pytest.mark.parametrize(
    "register",
    [
        "register_module_forward_hook",
        "register_module_forward_pre_hook",
        "register_module_full_backward_hook",
        "register_module_full_backward_pre_hook",
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_hooks_of_all_modules(register, in_place) -> None:
    def hook(*args):
        return None

    net = Net()
    if in_place:
        net.compile(backend="eager")
    model = net if in_place else torch.compile(net, backend="eager")
    model(X)
    assert torchloom.explain_call(model, X).is_certain
    handle = getattr(modules, register)(hook)
    try:
        told = torchloom.explain_call(model, X)
    finally:
        handle.remove()
    assert (told.action, told.is_certain) == ("hit", False)
    assert torchloom.explain_call(model, X).is_certain
