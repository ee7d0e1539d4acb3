"""What a record says of functions, calls, limits and lines is what happened."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchloom
from torchloom.records import Session, to_json

X, Y = torch.ones(2), torch.ones(3)


class First(nn.Module):
    def forward(self, x):
        x = x + 1
        print(end="")
        return x * 2


class Second(nn.Module):
    def forward(self, x):
        x = x - 1
        print(end="")
        return x / 2


def watched(run) -> Session:
    with torchloom.watch() as w:
        run()
    return w.record


def test_functions_that_share_a_name_are_told_apart() -> None:
    def run() -> None:
        torch.compile(First(), backend="eager")(X)
        torch.compile(Second(), backend="eager")(X)

    record = watched(run)
    assert [f.name for f in record.functions] == ["First.forward", "Second.forward"]
    for function, cls in zip(record.functions, (First, Second), strict=True):
        assert function.qualname == f"{cls.__name__}.forward"
        (child,) = function.children  # each continuation below its own function
        assert child.line == cls.forward.__code__.co_firstlineno + 2
        assert record[function.name] is function
    with pytest.raises(KeyError, match=r"several.*First\.forward.*Second\.forward"):
        _ = record["forward"]
    assert record["Second.forward"].source.count("x - 1") == 1


def test_a_continuation_stands_below_the_function_that_was_inlined_into() -> None:
    def run() -> None:
        torch.compile(nn.Sequential(First(), Second()), backend="eager")(X)

    names = {f.name: [c.name for c in f.children] for f in watched(run).functions}
    for name in ("First.forward", "Second.forward"):
        assert len(names[name]) == 1, names
    assert all(not name.startswith("torch_dynamo_resume") for name in names)


def test_a_continuation_of_what_was_compiled_before_stands_below_its_function() -> None:
    def fn(x):
        if x.sum() > 0:
            return x + 1
        return x - 1

    compiled = torch.compile(fn, backend="eager")
    compiled(X)
    record = watched(lambda: compiled(-X))
    (function,) = record.functions
    assert (function.name, function.entries, function.skipped) == ("fn", [], None)
    assert [len(child.entries) for child in function.children] == [1]
    assert record.num_recompiles == 0


def test_the_recompile_limit_is_said_loudly() -> None:
    def fn(x, n):
        return x + len(n)

    compiled = torch.compile(fn, backend="eager", dynamic=False)

    def run() -> None:
        with torch._dynamo.config.patch(recompile_limit=2):
            for n in ("a", "bb", "ccc", "dddd", "a", "ccc"):
                compiled(X, n)

    with torchloom.watch() as w:
        run()
    (function,) = w.record.functions
    assert [e.compile_id for e in function.entries] == ["0/0", "0/1"]  # none for the refused
    assert (function.recompile_limit, function.num_eager_calls) == (2, 3)
    assert [e.num_hits for e in function.entries] == [2, 1]
    assert "RECOMPILE LIMIT: fn" in w.summary()
    assert "3 calls that no entry fits ran eagerly" in w.summary()
    again = watched(lambda: [compiled(X, "eeeee") for _ in range(4)])
    (function,) = again.functions  # reached before this watch began
    assert (function.name, function.entries, function.num_eager_calls) == ("fn", [], 4)
    torch._dynamo.reset()
    fresh = watched(lambda: compiled(X, "eeeee"))
    assert fresh.functions[0].num_eager_calls == 0


def test_eager_calls_of_methods_and_callees() -> None:
    class Layer(nn.Module):
        def forward(self, x, n):
            return x + len(n)

    def callee(x, n):
        x = x + 1
        torch._dynamo.graph_break()
        return x * len(n)

    def caller(x, n):
        return callee(x, n) + 1

    for fn in (Layer(), caller):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="eager", dynamic=False)
        with torch._dynamo.config.patch(recompile_limit=1):
            record = watched(lambda compiled=compiled: [compiled(X, "a" * n) for n in range(4)])
        limited = [f for f in record.all_functions() if f.num_eager_calls]
        # torch 2.11 and 2.12 also leave what a function over its limit calls.
        assert {f.num_eager_calls for f in limited} == {3}
        assert {f.recompile_limit for f in limited} - {None} == {1}
        assert record.num_unknown_eager_calls == 0


def test_the_cause_of_a_break_in_a_frame_that_is_left_alone() -> None:
    def fn(x):
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    record = watched(lambda: torch.compile(fn, backend="eager")(X))
    (brk,) = record.breaks()
    assert brk.reason == "Call to `torch._dynamo.graph_break()`"
    assert brk.gb_type == "GB0025"
    assert brk.place.endswith(f":{fn.__code__.co_firstlineno + 3} in fn")
    assert "graph_break" in str(record.functions[0].skipped)


def test_calls_are_counted_over_resets() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")

    def run() -> None:
        for calls in (2, 3, 4):
            for _ in range(calls):
                compiled(X)
            torch._dynamo.reset()

    record = watched(run)
    assert [f.num_hits for f in record.functions] == [2, 3, 4]
    assert [f.epoch for f in record.functions] == [0, 1, 2]
    assert record.num_resets == 3
    assert all(f.entries[0].spans for f in record.functions)


def test_bytecode_stack_and_continuations() -> None:
    def fn(x):
        x = x * 2
        if x.sum() > 0:
            return x + 1
        return x - 1

    def outer_of_the_call() -> None:
        torch.compile(fn, backend="eager")(X)

    record = watched(outer_of_the_call)
    (entry,) = record["fn"].entries
    assert "COMPARE_OP" in entry.original_bytecode
    assert "__resume_at" in entry.bytecode
    assert "__resume_at" not in entry.original_bytecode
    assert "in outer_of_the_call" in entry.stack[-2]
    assert f":{fn.__code__.co_firstlineno} in fn" in entry.stack[-1]
    first, second = entry.continuations
    line = fn.__code__.co_firstlineno
    assert {first.line, second.line} == {line + 3, line + 4}
    assert entry.pseudo_source.index(first.name) < entry.pseudo_source.index(second.name)
    assert sorted([first.num_entries, second.num_entries]) == [0, 1]  # one was taken
    by_line = {each.line: each.source for each in (first, second)}
    assert "x + 1" in by_line[line + 3]
    assert "x - 1" in by_line[line + 4]
    assert to_json(record)["functions"]
    live = torchloom.entries(fn)[0]
    assert [each.source for each in live.continuations] == [first.source, second.source]
    assert live.original_bytecode
