"""What `explain_call` foretells is what torch then does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchloom
from support.foretold import agree, needs_option, what_happens
from torchloom.inspect.live.target import twin_of

X, Y = torch.ones(2), torch.ones(3)


def add(x, y=1):
    return x + y


def test_other_backends() -> None:
    def other(gm, example_inputs):
        return gm.forward

    first, second = torch.compile(add, backend="eager"), torch.compile(add, backend=other)
    assert [agree(first, X), agree(first, X)] == ["compile", "hit"]
    assert "compiled by eager" in str(torchloom.explain_call(second, X))
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


def test_the_other_branch_behind_a_break() -> None:
    def fn(x):
        x = x * 2
        if x.sum() > 0:
            return x + 1
        return x - 1

    compiled = torch.compile(fn, backend="eager")
    assert agree(compiled, X) == "compile"
    told = torchloom.explain_call(compiled, -X)
    assert (told.action, told.hit, told.is_certain) == ("unknown", "0/0", False)
    line = fn.__code__.co_firstlineno + 4
    assert f"line {line} " in told.why
    assert "up to its graph break" in str(told)
    assert agree(compiled, -X) == "unknown"
    assert [agree(compiled, -X), agree(compiled, X)] == ["hit", "hit"]
    assert not torchloom.explain_call(compiled, X).is_certain


def test_a_rest_with_nothing_to_compile() -> None:
    def fn(x):
        x = x + 1
        print(end="")
        return x

    compiled = torch.compile(fn, backend="eager")
    assert [agree(compiled, X), agree(compiled, X)] == ["compile", "hit"]


@pytest.mark.parametrize("own", [pytest.param(True, marks=needs_option("recompile_limit")), False])
def test_the_recompile_limit(own: bool) -> None:
    options = {"recompile_limit": 2} if own else {}
    compiled = torch.compile(lambda x, n: x + len(n), backend="eager", dynamic=False, **options)
    with torch._dynamo.config.patch(recompile_limit=8 if own else 2):
        done = [agree(compiled, X, n) for n in ("a", "bb")]
        told = torchloom.explain_call(compiled, X, "ccc")
        assert (told.action, told.limit) == ("eager", 2)
        seen = what_happens(compiled, X, "ccc")  # tries, and is refused
        assert seen in ("eager", "recompile")
        assert [agree(compiled, X, n) for n in ("ccc", "a", "dddd")] == ["eager", "hit", "eager"]
    assert done == ["compile", "recompile"]
    # Dynamo remembers, also where the limit would be higher now.
    assert agree(compiled, X, "eeeee") == "eager"
    torch._dynamo.reset()
    assert agree(compiled, X, "ccc") == "compile"


@needs_option("recompile_limit")
def test_a_whole_graph_over_its_limit_is_an_error() -> None:
    compiled = torch.compile(
        lambda x, n: x + len(n), backend="eager", fullgraph=True, recompile_limit=1
    )
    assert agree(compiled, X, "a") == "compile"
    assert agree(compiled, X, "bb") == "error"


def test_frames_that_dynamo_gave_up() -> None:
    def in_a_loop(x):
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    def nothing(x):
        return x

    for fn in (in_a_loop, nothing):
        compiled = torch.compile(fn, backend="eager")
        assert torchloom.explain_call(compiled, X).action == "compile"
        compiled(X)
        assert agree(compiled, X) == "eager"
        assert agree(compiled, Y) == "eager"
        assert torchloom.explain_call(compiled, X).why


def test_what_came_of_a_frame_long_ago_is_not_guessed(monkeypatch) -> None:
    from torchloom._torch import marks

    compiled = torch.compile(lambda x: x, backend="eager")
    compiled(X)
    assert torchloom.explain_call(compiled, X).action == "eager"
    for _ in range(70):  # Dynamo keeps notes of 64 compiles
        torch.compile(twin_of(add), backend="eager")(X)
    told = torchloom.explain_call(compiled, X)
    assert (told.action, told.why) == ("eager", "Dynamo leaves it alone since an earlier call")
    monkeypatch.setattr(marks, "_can_stop_frames", lambda: False)  # as inside of a debugger
    told = torchloom.explain_call(compiled, X)
    assert (told.action, told.hit) == ("unknown", None)
    assert "no longer notes" in str(told)


def test_entries_are_left_when_a_later_compile_is_given_up() -> None:
    def fn(x, deep):
        if deep:
            for _ in range(2):
                x = x + 1
                torch._dynamo.graph_break()
        return x + 1

    compiled = torch.compile(fn, backend="eager")
    assert [agree(compiled, X, False), agree(compiled, X, False)] == ["compile", "hit"]
    compiled(X, True)
    told = torchloom.explain_call(compiled, X, False).action
    assert told == what_happens(compiled, X, False)


def test_entries_are_not_used_after_a_call_with_nothing_to_compile() -> None:
    compiled = torch.compile(lambda xs: sum(xs), backend="eager")
    with torchloom.watch() as w:
        assert [agree(compiled, [X]), agree(compiled, [X])] == ["compile", "hit"]
        compiled([])  # Dynamo leaves the function alone from now on
    told = torchloom.explain_call(compiled, [X])
    assert (told.action, told.hit) == ("eager", None)
    assert "later call" in told.why
    assert agree(compiled, [X]) == "eager"
    (function,) = w.record.functions
    assert len(function.entries) == 1
    assert "nothing to compile" in str(function.skipped)
    assert "nothing to compile" in w.summary()


def test_a_compiled_function_that_is_disabled() -> None:
    compiled = torch.compile(add, backend="eager")
    disabled = torch.compiler.disable(compiled)
    assert [agree(disabled, X), agree(disabled, X)] == ["eager", "eager"]
    assert [agree(compiled, X), agree(disabled, X)] == ["compile", "eager"]
    # What is disabled and then compiled is compiled.
    assert agree(torch.compile(disabled, backend="eager"), X) == "hit"


def test_hooks_of_a_module_make_a_hit_uncertain() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x)

    wrapped, in_place = Block(), Block()
    in_place.compile(backend="eager")
    for model, compiled, hook in (
        (wrapped, torch.compile(wrapped, backend="eager"), lambda module, args, out: out + 1),
        (in_place, in_place, lambda module, args, out: out + 2),
    ):
        compiled(X)
        assert torchloom.explain_call(compiled, X).is_certain
        model.register_forward_hook(hook)
        told = torchloom.explain_call(compiled, X)
        assert (told.action, told.is_certain) == ("hit", False)
        assert what_happens(compiled, X) in ("compile", "recompile")  # the hook, by itself


def test_what_never_compiles_or_raises_instead() -> None:
    compiled = torch.compile(add, backend="eager")
    run_only = torch._dynamo.run(compiled)
    compiled(X)
    assert [agree(run_only, X), agree(run_only, Y)] == ["hit", "eager"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert [agree(compiled, X), agree(compiled, Y)] == ["hit", "error"]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=1):
        assert agree(compiled, Y) == "error"


def test_a_function_whose_entries_were_dropped_is_compiled_again() -> None:
    from torch._dynamo.eval_frame import reset_code

    compiled = torch.compile(add, backend="eager")
    compiled(X)
    reset_code(add.__code__)
    assert [agree(compiled, X), agree(compiled, X)] == ["compile", "hit"]


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


def test_inside_of_a_dispatch_mode() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    torch._dynamo.utils.clear_compilation_metrics()  # as after few compiles
    compiled = torch.compile(add, backend="eager")
    with Mode():
        assert agree(compiled, X) == "eager"
    told = torchloom.explain_call(compiled, X)
    assert agree(compiled, X) in ("eager", "compile")  # up to 2.14 for good
    assert told.action == "compile" or "passed it over" in told.why
    torch._dynamo.reset()
    assert agree(compiled, X) == "compile"
    with Mode(), torchloom.watch() as w:
        assert agree(compiled, Y) == "eager"
        torch.compile(lambda x: x * 3, backend="eager")(X)
    assert [f.num_eager_calls for f in w.record.functions] == [1]


def test_a_failing_backend_is_tried_again() -> None:
    def broken(gm, example_inputs):
        raise ValueError("not today")

    compiled = torch.compile(add, backend=broken)
    for _ in range(2):
        assert torchloom.explain_call(compiled, X).action == "compile"
        with pytest.raises(Exception, match="not today"):
            compiled(X)


def test_stances() -> None:
    compiled = torch.compile(add, backend="eager")
    with torch.compiler.set_stance("force_eager"):
        assert agree(compiled, X) == "eager"
    assert agree(compiled, X) == "compile"
    with torch.compiler.set_stance("force_eager"):
        told = torchloom.explain_call(compiled, X)
        assert (told.action, told.hit) == ("eager", None)
        assert "force_eager" in str(told)
    with torch.compiler.set_stance("eager_on_recompile"):
        assert [agree(compiled, X), agree(compiled, X.double())] == ["hit", "eager"]
    with torch.compiler.set_stance("fail_on_recompile"):
        assert [agree(compiled, X), agree(compiled, X.double())] == ["hit", "error"]
    with torch._dynamo.config.patch(disable=True):
        assert agree(compiled, X) == "hit"


def test_stances_that_cannot_be_foretold_or_wait() -> None:
    compiled = torch.compile(add, backend="eager")
    with torch.compiler.set_stance("eager_then_compile"):
        assert torchloom.explain_call(compiled, X).action == "eager"
        compiled(X)
        assert torchloom.entries(compiled) == []
        assert torchloom.explain_call(compiled, X).action == "compile"
        compiled(X)
        assert len(torchloom.entries(compiled)) == 1
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        told = torchloom.explain_call(compiled, X.double())
        assert (told.action, told.hit) == ("unknown", None)
        assert "skipped" in str(told)


def test_generators_run_as_they_are() -> None:
    def steps(x):
        yield x + 1

    compiled = torch.compile(steps, backend="eager")
    assert torchloom.explain_call(compiled, X).action == "eager"
    list(compiled(X))
    assert torchloom.entries(compiled) == []


def test_a_whole_graph_that_failed_is_said_to_have_failed() -> None:
    def fn(x):
        torch._dynamo.graph_break()
        return x + 1

    compiled = torch.compile(fn, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(X)
    told = torchloom.explain_call(compiled, X)
    assert told.action == "compile"
    assert "Unsupported" in told.why


def test_jit_functions() -> None:
    def broken(gm, example_inputs):
        raise ValueError("not today")

    good = torchloom.jit(add, backend="eager")
    assert [agree(good, X), agree(good, X)] == ["compile", "hit"]
    bad = torchloom.jit(add, backend=broken)
    assert torchloom.explain_call(bad, X).action == "compile"
    bad(X)
    assert torchloom.explain_call(bad, X).action == "eager"


def test_modules_of_torch_in_place() -> None:
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    told = [agree(model, X), agree(model, X)]
    assert told in (["eager", "eager"], ["compile", "hit"])  # Dynamo captures them since 2.14


def test_the_limit_of_all_compiles() -> None:
    compiled = torch.compile(lambda x, n: x + len(n), backend="eager", dynamic=False)
    with torch._dynamo.config.patch(accumulated_recompile_limit=2), torchloom.watch() as w:
        for n in ("a", "bb", "ccc", "dddd"):
            compiled(X, n)
        told = torchloom.explain_call(compiled, X, "eeeee")
    assert told.action == "eager"
    assert "limit of 2 compiles" in told.why
    (function,) = w.record.functions
    assert (function.recompile_limit, function.num_eager_calls) == (2, 2)


def test_reasons_are_what_the_entry_expects() -> None:
    compiled = torch.compile(lambda xs: sum(xs.values()), backend="eager")
    compiled({"a": X})
    (miss,) = torchloom.explain_call(compiled, {"a": X, "b": X}).misses
    assert miss.english == "argument xs: expected len 1, got another length"
