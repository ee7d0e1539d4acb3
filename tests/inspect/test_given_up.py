"""Functions that Dynamo leaves alone: its own mark on the code tells, not its notes of some last compile."""

from __future__ import annotations

import contextlib

import pytest
import torch

import torchloom
from support.foretold import agree, needs_option, what_happens
from torchloom.inspect.live.target import target_of

X, Y = torch.ones(2), torch.ones(3)
CAN_COUNT = hasattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count")


def flagged(x, flag=False):
    if flag:
        return x
    return x + 1


def breaking(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x + 2


def in_a_loop(x):
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


def lengthen(x, n):
    return x + len(n)


def broken(gm, example_inputs):
    raise ValueError("not today")


# --- another code object of the same name, file and line


@pytest.mark.parametrize("ask", [torchloom.explain, torchloom.jit(flagged, backend="eager")])
def test_a_copy_that_was_given_up_says_nothing_of_the_function(ask) -> None:
    compiled = torch.compile(flagged, backend="eager")
    compiled(X)
    args = (flagged, X, True) if ask is torchloom.explain else (X, True)
    ask(*args)
    assert agree(compiled, X) == "hit"
    assert agree(compiled, Y) == "recompile"


def test_two_functions_of_one_line_are_told_apart() -> None:
    first, second = (torch.compile(f, backend="eager") for f in (lambda x: x, lambda x: x + 1))
    first(X)
    assert agree(first, X) == "eager"
    assert [agree(second, X), agree(second, X)] == ["compile", "hit"]


def test_functions_of_one_name_from_exec_are_told_apart() -> None:
    made = []
    for text in ("return x", "return x + 1"):
        names: dict = {}
        exec(f"def fn(x):\n    {text}", names)
        made.append(torch.compile(names["fn"], backend="eager"))
    first, second = made
    if target_of(first).wrapped is not None:
        pytest.skip("this torch compiles what exec made in a function of its own, shared by all")
    second(X), first(X)
    assert (agree(first, X), agree(second, X)) == ("eager", "hit")


def test_the_reason_of_another_one_is_not_told() -> None:
    def make(deep):
        def fn(x):
            return in_a_loop(x) if deep else x

        return fn

    fns = [torch.compile(make(deep), backend="eager") for deep in (False, True)]
    for each in fns:
        each(X)
    assert torchloom.explain_call(fns[0], X).action == "eager"
    assert "loop" not in torchloom.explain_call(fns[0], X).why


# --- how a compile ended, and with which settings


@pytest.mark.parametrize("block", ["fullgraph", "error_on_graph_break"])
def test_a_failure_that_was_raised_is_no_mark(block) -> None:
    if block == "error_on_graph_break" and not hasattr(torch._dynamo, block):
        pytest.skip("this torch has no error_on_graph_break")
    whole = torch.compile(breaking, fullgraph=block == "fullgraph", backend="eager")
    part = torch.compile(breaking, backend="eager")
    raising = block == "error_on_graph_break"
    guard = torch._dynamo.error_on_graph_break(True) if raising else contextlib.nullcontext()
    with guard, contextlib.suppress(Exception):
        whole(X)
    assert [agree(part, X), agree(part, X)] == ["compile", "hit"]


def test_a_suppressed_failure_is_one_for_good() -> None:
    compiled = torch.compile(breaking, backend=broken)
    with torch._dynamo.config.patch(suppress_errors=True):
        compiled(X)
    assert agree(compiled, X) == "eager"
    assert "not today" in torchloom.explain_call(compiled, X).why


def test_a_failure_with_errors_suppressed_only_later_is_none() -> None:
    compiled = torch.compile(flagged, backend=broken)
    with contextlib.suppress(Exception):
        compiled(X)
    with torch._dynamo.config.patch(suppress_errors=True):
        assert torchloom.explain_call(compiled, X).action == "compile"


def test_older_entries_of_a_jit_do_not_serve_after_a_failure() -> None:
    def picky(gm, example_inputs):
        if any(node.target is torch.cos for node in gm.graph.nodes):
            raise ValueError("no cosines")
        return gm.forward

    @torchloom.jit(backend=picky)
    def h(x, mode):
        return torch.cos(x) if mode == "b" else x + 1

    assert [agree(h, X, "a"), agree(h, X, "a")] == ["compile", "hit"]
    h(X, "b")
    told = torchloom.explain_call(h, X, "a")
    assert (told.action, told.hit) == ("eager", None)
    assert "no cosines" in told.why
    assert agree(h, X, "a") == "eager"


@pytest.mark.skipif(not CAN_COUNT, reason="this torch lets whole graphs run as they are")
def test_a_whole_graph_of_what_was_given_up_is_an_error() -> None:
    part = torch.compile(in_a_loop, backend="eager")
    whole = torch.compile(in_a_loop, backend="eager", fullgraph=True)
    part(X)
    assert agree(part, X) == "eager"
    told = torchloom.explain_call(whole, X)
    assert (told.action, told.is_certain) == ("error", False)  # what it calls might be compiled
    assert agree(whole, X) == "error"


@pytest.mark.skipif(not CAN_COUNT, reason="this torch lets whole graphs run as they are")
def test_a_whole_graph_with_nothing_in_it_is_an_error() -> None:
    def nothing(x):
        return x

    whole = torch.compile(nothing, backend="eager", fullgraph=True)
    torch.compile(nothing, backend="eager")(X)
    told = torchloom.explain_call(whole, X)
    assert (told.action, told.is_certain) == ("error", True)
    assert agree(whole, X) == "error"


def test_a_jit_of_a_whole_graph_tries_again() -> None:
    compiled = torchloom.jit(breaking, backend="eager", fullgraph=True)
    compiled(X)
    assert compiled.failures
    assert agree(compiled, X) == "compile"


def test_a_mark_that_left_no_note_is_seen() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    compiled = torch.compile(flagged, backend="eager")
    compiled(X)
    with Mode():
        compiled(Y)
    told = torchloom.explain_call(compiled, X).action
    assert told == what_happens(compiled, X)
    assert told in ("eager", "hit")  # up to 2.14 Dynamo leaves it alone for good


def test_the_same_backend_with_another_entry_behind_a_break() -> None:
    """What follows a break may be compiled by another backend alone."""

    def other(gm, example_inputs):
        return gm.forward

    def fn(x):
        x = x * 2
        if x.sum() > 0:
            return x + 1
        return x - 1

    first, second = torch.compile(fn, backend="eager"), torch.compile(fn, backend=other)
    first(X), second(X), first(-X)
    assert agree(first, -X) == "hit"
    told = torchloom.explain_call(second, -X)
    assert told.action in ("unknown", "hit")


# --- recompile limits


@needs_option("isolate_recompiles")
def test_a_limit_that_another_region_has_reached() -> None:
    alone, other = (
        torch.compile(
            lengthen, isolate_recompiles=True, recompile_limit=n, dynamic=False, backend="eager"
        )
        for n in (1, 4)
    )
    shared = torch.compile(lengthen, backend="eager", dynamic=False)
    assert agree(alone, X, "a") == "compile"
    alone(X, "bb")
    assert agree(alone, X, "bb") == "eager"
    assert agree(other, X, "bb") in ("compile", "recompile")
    assert agree(shared, X, "bb") in ("compile", "recompile")
    assert [agree(each, X, "bb") for each in (alone, other, shared)][1:] == ["hit", "hit"]


def test_over_a_limit_nothing_is_compiled_whatever_the_settings() -> None:
    compiled = torch.compile(lengthen, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(X, "a"), compiled(X, "bb")
    assert [agree(compiled, X, "a"), agree(compiled, X, "bb")] == ["hit", "eager"]
    with torch.compiler.set_stance("fail_on_recompile"):
        assert agree(compiled, X, "bb") == "eager"
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert agree(compiled, X, "bb") == "eager"


# --- asking


def test_asking_runs_nothing_and_leaves_the_order_of_entries() -> None:
    ran = []

    def fn(x, n):
        ran.append(n)
        return x + n

    compiled = torch.compile(fn, backend="eager", dynamic=False)
    for n in (1, 2.5, 3.5):
        compiled(X, n)
    before = ([e.compile_id for e in torchloom.entries(compiled)], list(ran))
    raw = [entry.compile_id for entry in _raw(fn)]
    for n in (1, 2.5, 9):
        torchloom.explain_call(compiled, X, n)
    assert ([e.compile_id for e in torchloom.entries(compiled)], ran) == before
    assert [entry.compile_id for entry in _raw(fn)] == raw


def test_asking_leaves_nothing_switched_on(monkeypatch) -> None:
    """Were the callback gone in between, Dynamo would count this thread as one that is still inside."""
    from torch._C._dynamo import eval_frame

    compiled = torch.compile(flagged, backend="eager")
    compiled(X)
    real, pairs = eval_frame.set_eval_frame, []

    def spy(callback):
        before = real(callback)
        pairs.append((before, callback))
        return before

    torch._dynamo.eval_frame.skip_code(spy.__code__)
    monkeypatch.setattr(eval_frame, "set_eval_frame", spy)
    torchloom.explain_call(compiled, X)
    monkeypatch.undo()
    assert len(pairs) == 4
    for (nothing, ours), (taken, back) in zip(pairs[::2], pairs[1::2], strict=True):
        assert (nothing, back) == (None, None)
        assert taken is ours is not None


def _raw(fn):
    return torch._dynamo.eval_frame._debug_get_cache_entry_list(fn.__code__)


def test_asking_inside_of_a_watch_counts_no_calls() -> None:
    compiled = torch.compile(lengthen, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1), torchloom.watch() as w:
        compiled(X, "a"), compiled(X, "bb")
        for _ in range(5):
            torchloom.explain_call(compiled, X, "bb")
    (function,) = w.record.functions
    assert function.num_eager_calls == 1


def test_where_frames_cannot_be_stopped_the_notes_are_asked(monkeypatch) -> None:
    """As inside of a debugger: tracing is off there."""
    from torchloom._torch import marks

    def own(x):
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    compiled, hitting = (torch.compile(fn, backend="eager") for fn in (own, flagged))
    compiled(X), hitting(X)
    monkeypatch.setattr(marks, "_can_stop_frames", lambda: False)
    told = torchloom.explain_call(compiled, X)
    assert (told.action, told.is_certain) == ("eager", False)
    told = torchloom.explain_call(hitting, X)
    assert (told.action, told.is_certain) == ("hit", False)


def test_a_trace_function_of_the_program_is_back_afterwards() -> None:
    import sys

    def trace(frame, event, arg):
        return None

    compiled = torch.compile(flagged, backend="eager")
    compiled(X)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        told = torchloom.explain_call(compiled, X)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert told.action == "hit"
