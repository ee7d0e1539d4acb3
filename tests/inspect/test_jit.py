"""The just-in-time compiler with entries at hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchloom
from support.foretold import agree, needs_option, what_happens
from torchloom.errors import BackendError, InspectError


class A(nn.Module):
    def forward(self, x):
        return torch.exp(2 * x)


class B(nn.Module):
    def forward(self, x):
        return torch.exp(-x)


def cancel_log_exp(gm: torch.fx.GraphModule) -> None:
    """Turn log(exp(y)) into y."""
    for node in list(gm.graph.nodes):
        if node.target is torch.log:
            (inner,) = node.args
            if inner.target is torch.exp:
                node.replace_all_uses_with(inner.args[0])
    gm.graph.eliminate_dead_code()


def test_the_two_modules_become_two_readable_entries() -> None:
    @torchloom.jit(backend="eager", passes=[cancel_log_exp])
    def f(x, mod):
        return torch.log(mod(x))

    x, a, b = torch.rand(5), A(), B()
    counts = [len(f.compiled_entries)]
    for module in (a, a, b, b):
        f(x, module)
        counts.append(len(f.compiled_entries))
    assert counts == [0, 1, 1, 2, 2]
    first, second = f.compiled_entries
    assert [entry.code.expression for entry in (first, second)] == ["2 * x", "-x"]
    assert first.guard(x, a)
    assert not first.guard(x, b)
    assert second.guard(x, b)
    assert not second.guard(x.double(), b)
    assert torch.equal(f(x, a), 2 * x)
    assert torch.equal(f(x, b), -x)
    assert "mod" in repr(first)
    assert "2 * x" in repr(first)
    assert "def f(x, mod):" in first.code.source
    guard, code = first
    assert "float32 tensor" in str(guard)
    assert "class" in str(code)


def test_both_names_and_use_without_arguments() -> None:
    assert torchloom.just_in_time_compile is torchloom.jit

    @torchloom.jit
    def f(x):
        """Add one."""
        return x + 1

    assert (f.__name__, f.__doc__) == ("f", "Add one.")
    torch.testing.assert_close(f(torch.ones(3)), torch.full((3,), 2.0))
    assert f.compiled_entries[0].code.expression == "x + 1"


def test_an_expression_in_which_values_are_used_again_and_again_stays_short() -> None:
    @torchloom.jit(backend="eager")
    def f(x, d):
        x = torch.log(-(x + d["a"])) * x[0]
        y = x
        for _ in range(60):
            y = y + y
        return x, y

    f(torch.ones(2), {"a": torch.ones(2)})
    text = f.compiled_entries[0].code.expression
    assert text.startswith("(torch.log(-(x + d_a)) * x[0], ")
    assert "..." in text
    assert len(text) < 2000


def test_a_failing_compile_runs_the_original_and_says_why(caplog) -> None:
    def broken(gm, example_inputs):
        raise RuntimeError("no such target")

    @torchloom.jit(backend=broken)
    def f(x):
        return x + 1

    for _ in range(2):
        assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
    assert f.compiled_entries == []
    assert len(f.failures) == 1
    assert "no such target" in f.failures[0]
    strict = torchloom.jit(f._fn, backend=broken, strict=True)
    with pytest.raises(Exception, match="no such target"):
        strict(torch.ones(2))


def test_what_ran_before_a_failing_part_does_not_run_again() -> None:
    ran = []

    def second_fails(gm, example_inputs):
        if any(node.target is torch.cos for node in gm.graph.nodes):
            raise RuntimeError("second part")
        return gm.forward

    @torchloom.jit(backend=second_fails)
    def f(x):
        x = torch.sin(x)
        ran.append(1)
        torch._dynamo.graph_break()
        return torch.cos(x)

    x = torch.ones(2)
    assert torch.allclose(f(x), torch.cos(torch.sin(x)))
    assert ran == [1]
    assert "second part" in f.failures[0]


def test_whole_graphs_or_the_original() -> None:
    @torchloom.jit(backend="eager", fullgraph=True)
    def f(x):
        torch._dynamo.graph_break()
        return x + 1

    assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
    assert f.failures
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torchloom.jit(f._fn, backend="eager", fullgraph=True, strict=True)(torch.ones(2))


def test_bad_input() -> None:
    with pytest.raises(InspectError, match="takes a Python function"):
        torchloom.jit(nn.Linear(2, 2))
    with pytest.raises(BackendError, match="did you mean"):
        torchloom.jit(lambda x: x, backend="inducter")


def test_an_entry_can_be_called() -> None:
    @torchloom.jit(backend="eager", passes=[cancel_log_exp])
    def f(x, mod, *, scale=1):
        return torch.log(mod(x)) * scale

    x, a, b = torch.rand(5), A(), B()
    f(x, a), f(x, b)
    first, second = f.compiled_entries
    assert torch.equal(first(x, a), 2 * x)
    assert torch.equal(second(x, b), -x)
    with pytest.raises(InspectError, match=r"does not serve such a call: .*mod"):
        first(x, b)
    assert torch.equal(first.code(x, b), 2 * x)  # its code, whatever the guard says
    with pytest.raises(InspectError, match="cannot be called so"):
        first(x)
    assert len(f.compiled_entries) == 2  # running an entry compiles nothing


def test_an_entry_of_a_closure_with_defaults() -> None:
    shift = torch.ones(3)

    @torchloom.jit(backend="eager")
    def f(x, y=2, *rest, **named):
        return x * y + shift + sum(rest) + sum(named.values())

    x = torch.ones(3)
    expected = [f(x), f(x, 3, x, z=x)]
    plain, full = f.compiled_entries
    assert torch.equal(plain(x), expected[0])
    assert torch.equal(full(x, 3, x, z=x), expected[1])


def test_an_entry_with_a_graph_break_shows_and_runs_both_ways() -> None:
    @torchloom.jit(backend="eager")
    def f(x):
        x = x * 2
        if x.sum() > 0:
            return x + 1
        return x - 1

    x = torch.ones(2)
    f(x)
    (entry,) = f.compiled_entries
    assert torch.equal(entry(x), x * 2 + 1)
    assert torch.equal(entry(-x), x * -2 - 1)  # the branch that was never taken
    first, second = entry.code.continuations
    text = entry.code.source
    positions = [text.index(f"return {each.name}(") for each in (first, second)]
    assert positions == sorted(positions)
    assert text.index(f"def {first.name}") < text.index(f"def {second.name}")
    assert "x + 1" in text
    assert "x - 1" in text
    assert entry.code.original.co_name == "f"
    assert entry.code.original is not entry.code.bytecode
    assert len(f.compiled_entries) == 1


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
