"""A jit that is not strict runs the original where its own compile fails, and touches no other function's."""

from __future__ import annotations

import pytest
import torch

import torchloom
from support.foretold import agree, needs_option, what_happens

X, Y = torch.ones(2), torch.ones(3)


def broken(gm, example_inputs):
    raise ValueError("not today")


@needs_option("recompile_limit")
def test_over_the_limit_of_a_whole_graph_the_original_runs() -> None:
    @torchloom.jit(backend="eager", fullgraph=True, recompile_limit=1)
    def f(x, n):
        return x + len(n)

    assert [agree(f, X, "a"), agree(f, X, "a")] == ["compile", "hit"]
    for _ in range(2):
        told = torchloom.explain_call(f, X, "bb")
        assert (told.action, told.limit) == ("eager", 1)
        assert f(X, "bb").tolist() == [3, 3]
    assert agree(f, X, "a") == "hit"
    assert len(f.failures) == 1
    strict = torchloom.jit(f._fn, backend="eager", fullgraph=True, recompile_limit=1, strict=True)
    strict(X, "a")
    assert what_happens(strict, X, "bb") == "error"


def test_a_whole_graph_with_nothing_in_it_runs_once() -> None:
    ran = []

    @torchloom.jit(backend="eager", fullgraph=True)
    def f(x):
        return x

    @torchloom.jit(backend="eager", fullgraph=True)
    def breaks(x):
        ran.append(1)
        torch._dynamo.graph_break()
        return x

    for number in range(3):
        assert f(X) is X
        assert breaks(X) is X
        assert len(ran) == number + 1
    assert breaks.failures


def test_other_functions_fail_as_they_do_elsewhere() -> None:
    def other(x):
        return x * 2

    compiled = torch.compile(other, backend=broken)

    @torch.compiler.disable
    def helper(x):
        return compiled(x)

    @torchloom.jit(backend="eager")
    def f(x):
        return helper(x + 1)

    for _ in range(2):
        with pytest.raises(Exception, match="not today"):
            f(X)
    assert torchloom.explain_call(compiled, X).action == "compile"  # it was not given up
    assert f.failures == []


@pytest.mark.parametrize("whole", [False, True])
def test_errors_of_others_do_not_run_the_function_again(whole) -> None:
    ran = []

    def other(x):
        torch._dynamo.graph_break()
        return x * 2

    compiled = torch.compile(other, backend="eager", fullgraph=True)

    def effect(gm, example_inputs):
        def run(*args):
            ran.append(1)
            compiled(X)
            return gm.forward(*args)

        return torch.compiler.disable(run)

    @torchloom.jit(backend=effect, fullgraph=whole)
    def f(x):
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        f(X)
    assert ran == [1]


def test_settings_are_as_they_were_while_the_function_runs() -> None:
    seen = []

    @torch.compiler.disable
    def look(x):
        seen.append(torch._dynamo.config.suppress_errors)
        return x

    @torchloom.jit(backend="eager")
    def f(x):
        return look(x + 1) + 1

    f(X), f(X)
    assert seen == [False, False]


def test_a_failing_frame_is_left_alone_and_its_reason_kept() -> None:
    @torchloom.jit(backend=broken)
    def f(x):
        return x + 1

    assert agree(f, X) == "compile"
    assert "not today" in f.failures[0]
    assert torchloom.entries(f) == []
    other = torch.compile(f._fn, backend="eager")
    assert agree(other, X) == "compile"


def test_a_watch_shows_the_program_as_caller_of_a_jit() -> None:
    @torchloom.jit(backend="eager")
    def f(x):
        return x + 1

    with torchloom.watch() as w:
        f(X)
    (entry,) = w.record.entries()
    assert entry.stack
    assert not any("fallback.py" in str(call) for call in entry.stack)


def test_a_forbidden_recompile_of_a_jit() -> None:
    @torchloom.jit(backend="eager", dynamic=False)
    def f(x):
        return x + 1

    f(X)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert what_happens(f, Y) == "error"
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert f(Y).tolist() == [2, 2, 2]
