"""Advice about a recompile is tried: what it says to do saves the compile, what it calls constant stays so."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchloom
from torchloom._torch.module_calls import compile_in_place
from torchloom.records import Session

X = torch.ones(2)


def recorded(fn: Callable[..., Any], *calls: tuple[Any, ...], **options: Any) -> Session:
    torch._dynamo.reset()
    with torchloom.watch() as w:
        compiled = torch.compile(fn, backend="eager", **options)
        for call in calls:
            compiled(*call)
    return w.record


def reasons(record: Session) -> list[Any]:
    """Return why the entry before the last one did not serve the last call that was compiled."""
    return next(reversed(list(record.entries()))).recompiles


def test_nan() -> None:
    record = recorded(lambda x, n: x + n, (X, 1.0), (X, 2.0), (X, math.nan))
    first = reasons(record)[0]
    assert (first.source, first.expected, first.actual) == ("argument n", "not nan", "nan")
    assert "nan" in first.fix
    assert "length" not in first.fix
    english = [guard.english for entry in record.entries() for guard in entry.guards]
    assert "argument n is not nan" in english
    assert "argument n is nan" in english


def test_bounds_of_a_float() -> None:
    record = recorded(lambda x, n: x + 1 if n > 3 else x - 1, (X, 1.0), (X, 2.0), (X, 5.0))
    (first, _) = reasons(record)
    assert (first.source, first.expected) == ("argument n", "<= 3.0")
    assert "branches on this number" in first.fix


def marked(size: int) -> torch.Tensor:
    tensor = torch.ones(size)
    torch._dynamo.decorators.mark_unbacked(tensor, 0)
    return tensor


@pytest.mark.parametrize("sizes", [(1, 0), (3, 1, 0)])
def test_sizes_zero_and_one(sizes: tuple[int, ...]) -> None:
    def fn(x):
        return x + 1

    calls = [(torch.ones(size),) for size in sizes]
    record = recorded(fn, *calls)
    assert len(list(recorded(fn, *calls, dynamic=True).entries())) == len(sizes)
    assert len(list(recorded(fn, *((marked(size),) for size in sizes)).entries())) == 1
    for reason in reasons(record):
        assert "0 and 1 are compiled apart" in reason.fix
        assert "mark_unbacked(x, 0) before the call of fn" in reason.fix
        assert "mark_dynamic(" not in reason.fix


@pytest.mark.parametrize("first", [0, 1])
def test_a_first_call_of_size_zero_or_one(first: int) -> None:
    (reason,) = reasons(recorded(lambda x: x + 1, (torch.ones(first),), (torch.ones(3),)))
    assert "now dynamic: entry 0/1 serves sizes >= 2" in reason.fix
    assert "saves this compile" not in reason.fix
    assert "0 and 1 are compiled apart" in reason.fix


def test_sizes_that_were_equal_and_differ_are_a_reason_like_others() -> None:
    calls = ((X, torch.ones(2)), (X, torch.ones(3)))
    (reason,) = reasons(recorded(lambda x, y: x.sum() + y.sum(), *calls, dynamic=True))
    assert (reason.source, reason.expected) == ("argument y", "size(0) == x.size(0)")
    assert "keep them equal" in reason.fix


def helper(given):
    given = given * 2
    torch._dynamo.graph_break()
    return given + 1


def outer(x):
    return helper(x + 1) * 3


def picked(x):
    y = x[x > 0]
    return y * 2 + 1


def size_fixes(record: Session) -> dict[str, str]:
    found = [(f.name, e) for f in record.all_functions() for e in f.entries]
    return {
        f"{name} {each.source}": each.fix
        for name, entry in found
        for each in entry.recompiles
        if each.expected.startswith("size(")
    }


def straight(x):
    return x + 1


def test_an_argument_is_marked_where_all_is_one_graph() -> None:
    ((_, fix),) = size_fixes(recorded(straight, (torch.ones(3),), (torch.ones(5),))).items()
    assert "torch._dynamo.mark_dynamic(x, 0) before the first call of straight saves this" in fix
    tensor = torch.ones(3)
    torch._dynamo.mark_dynamic(tensor, 0)
    assert len(list(recorded(straight, (tensor,), (torch.ones(5),)).entries())) == 1


@pytest.mark.parametrize("fn", [outer, picked])
def test_values_that_the_compiled_function_made_are_never_marked(fn) -> None:
    calls = ((torch.ones(4),), (torch.tensor([1.0, 1, -1]),))
    fixes = size_fixes(recorded(fn, *calls))
    assert len(fixes) > 1
    for fix in fixes.values():
        assert "mark_dynamic" not in fix
        assert f"{fn.__name__} with dynamic=True" in fix, fixes
    record = recorded(fn, *calls, dynamic=True)
    assert all(len(f.entries) <= 1 for f in record.all_functions())  # what it says helps


class Mine:
    compiler_name = property(lambda self: "mine(eager)")

    def __call__(self, gm, inputs, **options):
        return gm.forward


def test_a_module_compiled_in_place_is_told_by_its_own_lines_and_backend() -> None:
    class Broken(nn.Module):
        def forward(self, x):
            x = torch.relu(x)
            torch._dynamo.graph_break()
            return x + 1

    model = nn.Sequential(Broken())
    with torchloom.watch() as w:
        compile_in_place(model, Mine())
        for size in (2, 3):
            model(torch.ones(size))
    record = w.record
    places = [frame for each in record.breaks() for frame in each.user_stack]
    places += [g.user_line for e in record.entries() for g in e.guards if g.user_line]
    places += [call for e in record.entries() for call in e.stack]
    own = Path(torchloom.__file__).parent, Path(torch.__file__).parent
    assert any("test_advice.py" in place for place in places)
    assert [p for p in places if p.startswith(tuple(map(str, own)))] == []
    assert {e.backend for e in record.entries()} == {"mine(eager)"}


def test_arguments_of_a_module_compiled_in_place_have_the_names_of_its_forward() -> None:
    class Named(nn.Module):
        def forward(self, first, second=None):
            return first + second

    model = Named()
    with torchloom.watch() as w:
        compile_in_place(model, Mine())
        for size in (2, 3):
            model(torch.ones(size), second=torch.ones(size))
    (function,) = w.record.functions
    older, newer = function.entries
    assert set(older.trigger) == {"first", "second"}
    assert any(guard.english.startswith("argument second is a float32") for guard in older.guards)
    (reason,) = newer.recompiles
    assert reason.source == "argument first"
    assert "torch._dynamo.mark_dynamic(first, 0) before the first call of Named" in reason.fix
