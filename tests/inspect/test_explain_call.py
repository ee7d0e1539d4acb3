"""`explain_call`: torch's own check of the guards, beside what torch then does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchloom
from support.foretold import agree, needs_option
from torchloom._torch import introspect

X, Y = torch.ones(2), torch.ones(3)


def add(x, y=1):
    return x + y


def test_other_backends() -> None:
    def other(gm, example_inputs):
        return gm.forward

    first, second = torch.compile(add, backend="eager"), torch.compile(add, backend=other)
    assert [agree(first, X), agree(first, X)] == ["compile", "hit"]
    assert "expected backend eager, got another backend" in str(torchloom.explain_call(second, X))
    assert [agree(second, X), agree(second, X)] == ["recompile", "hit"]
    assert agree(torch.compile(add, backend="eager"), X) == "hit"  # the same backend under one name
    assert agree(torch.compile(add, backend="eager", dynamic=True), X) in ("hit", "recompile")


@needs_option("isolate_recompiles")
def test_regions_of_their_own() -> None:
    shared = torch.compile(add, backend="eager")
    alone = torch.compile(add, backend="eager", isolate_recompiles=True)
    assert [agree(alone, X), agree(alone, X)] == ["compile", "hit"]
    assert agree(shared, X) in ("compile", "recompile")
    assert agree(torch.compile(add, backend="eager", isolate_recompiles=True), X) == "hit"


@pytest.mark.parametrize("own", [pytest.param(True, marks=needs_option("recompile_limit")), False])
def test_the_recompile_limit(own: bool) -> None:
    options = {"recompile_limit": 2} if own else {}
    compiled = torch.compile(lambda x, n: x + len(n), backend="eager", dynamic=False, **options)
    with torch._dynamo.config.patch(recompile_limit=8 if own else 2):
        done = [agree(compiled, X, n) for n in ("a", "bb")]
        told = torchloom.explain_call(compiled, X, "ccc")
        assert (told.action, told.limit) == ("eager", 2)
        assert "limit of 2" in str(told)
        compiled(X, "ccc")
        assert [agree(compiled, X, n) for n in ("ccc", "a", "dddd")] == ["eager", "hit", "eager"]
    assert done == ["compile", "recompile"]
    torch._dynamo.reset()
    assert agree(compiled, X, "ccc") == "compile"


def test_what_no_guard_decides_is_said_in_a_sentence() -> None:
    compiled = torch.compile(add, backend="eager")
    compiled(X)
    disabled = torch.compiler.disable(compiled)
    told = torchloom.explain_call(disabled, X)
    assert (told.action, told.hit, told.hits) == ("unknown", None, ("0/0",))
    assert "torch.compiler.disable" in str(told)
    assert agree(torch.compile(disabled, backend="eager"), X) == "hit"
    for stance in ("force_eager", "eager_on_recompile", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            told = torchloom.explain_call(compiled, X)
            assert (told.action, told.hit, told.hits) == ("unknown", None, ("0/0",))
            assert stance in str(told)
    with torch._dynamo.config.patch(disable=True):
        assert "disable" in torchloom.explain_call(compiled, X).why


def test_a_forward_that_is_set_on_the_module() -> None:
    class Block(nn.Module):
        def forward(self, x):
            return x + 1

    def other(x):
        return x * 2

    model = Block()
    compiled = torch.compile(model, backend="eager")
    assert [agree(compiled, X), agree(compiled, X)] == ["compile", "hit"]
    model.forward = other
    assert [agree(compiled, X), agree(compiled, X)] == ["compile", "hit"]
    assert [entry.function for entry in torchloom.entries(compiled)] == ["other"]
    model = Block()
    model.forward = torch.compile(model.forward, backend="eager")
    assert agree(model, X) == agree(model, Y[:2]) == "hit"


def test_behind_a_break_no_guard_is_asked() -> None:
    def fn(x):
        x = x * 2
        if x.sum() > 0:
            return x + 1
        return x - 1

    compiled = torch.compile(fn, backend="eager")
    compiled(X)
    assert torchloom.explain_call(compiled, -X).hit == "0/0"


def test_asking_runs_nothing_and_leaves_the_order_of_entries() -> None:
    ran = []

    def fn(x, n):
        ran.append(n)
        return x + n

    compiled = torch.compile(fn, backend="eager", dynamic=False)
    with torchloom.watch() as w:
        for n in (1, 2.5, 3.5):
            compiled(X, n)
        raw, before = introspect.cache_entries(fn.__code__), list(ran)
        for n in (1, 2.5, 9):
            torchloom.explain_call(compiled, X, n)
    after = introspect.cache_entries(fn.__code__)
    assert [entry.compile_id for entry in after] == [entry.compile_id for entry in raw]
    assert ran == before
    assert w.num_lookups == 2


def test_reasons_are_what_the_entry_expects() -> None:
    compiled = torch.compile(lambda xs: sum(xs.values()), backend="eager")
    compiled({"a": X})
    (miss,) = torchloom.explain_call(compiled, {"a": X, "b": X}).misses
    assert miss.english == "argument xs: expected len 1, got another length"
