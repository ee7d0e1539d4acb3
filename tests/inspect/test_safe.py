"""What is watched or looked at can neither crash nor leak: no dead memory, no values, no errors of ours."""

from __future__ import annotations

import gc
import sys
import textwrap
import weakref

import torch
from torch import nn

import torchloom
from support.commands import python
from support.hostile import HOSTILE
from torchloom.inspect.pseudo import pseudo_source


def run_alone(text: str) -> str:
    """Run a program in a process of its own: one that crashes must not take the tests with it."""
    done = python("-c", textwrap.dedent(text))
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def test_entries_that_are_kept_over_a_reset_or_longer_than_their_function_can_be_read() -> None:
    shown = run_alone("""
        import gc, torch, torchloom

        @torchloom.jit(backend="eager")
        def g(x):
            return x * 2

        def f(x):
            return x + 1

        c = torch.compile(f, backend="eager")
        x = torch.ones(2)
        c(x), g(x)
        kept = [*torchloom.entries(c)]
        ours = g.compiled_entries[0]
        guard = kept[0].guard
        for _ in range(3):
            torch._dynamo.reset()
            gc.collect()
            junk = [bytearray(100 + i) for i in range(20_000)]
            del junk
        for e in kept:
            print(e.compile_id, e.backend, e.function, len(e.guard), e.code.co_name, e.is_live)
            print(repr(e), str(e.guard), e.source)
        print(str(guard), guard.records()[0].text)
        print(ours, ours.guard(x), ours.guard(x.double()), ours.code.source, str(ours.code))
        print(torchloom.entries(c), torchloom.explain_call(c, x).action)
        c(x)
        print(len(torchloom.entries(c)), len(g.compiled_entries))

        def make():
            def f(x):
                return x + 1
            return torch.compile(f, backend="eager")

        for size in range(5):  # of a function that is gone
            c = make()
            c(torch.ones(size + 2))
            kept += torchloom.entries(c)
            del c
            gc.collect()
        assert all(str(e.guard) + e.source for e in kept)
    """)
    assert "0/0 eager f" in shown
    assert "False" in shown.splitlines()[0]  # torch holds it no more
    assert shown.splitlines()[-2] == "[] compile"
    assert shown.splitlines()[-1] == "1 0"


def test_pseudo_source_asks_nothing_of_hostile_constants() -> None:
    class Meta(type):
        def __eq__(cls, other):
            raise RuntimeError("== of a class")

        __hash__ = type.__hash__

    class Strange(metaclass=Meta):
        pass

    code = (lambda: 1).__code__
    for value in (HOSTILE, Strange(), Strange, 10**6000, {"a": HOSTILE}, (1, HOSTILE), "x" * 9000):
        text = pseudo_source(code.replace(co_consts=(value,) * len(code.co_consts)))
        assert "not readable" not in text
        assert len(text) < 1000


def test_a_watch_that_fails_leaves_the_program_alone(monkeypatch, tmp_path) -> None:
    """Whatever in a watch breaks, the block goes on and ends as it would without it."""

    def broken(*args, **kwargs):
        raise ValueError("a bug of ours")

    for place in (
        "api.watch.build_session",
        "listen.collector.continuations",
        "api.watch.save_record",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"torchloom.inspect.{place}", broken)
            torch._dynamo.reset()
            with torchloom.watch(tmp_path / "r.json") as w:
                out = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
            assert out.tolist() == [2, 2]
            assert w.record is not None


def test_one_entry_that_cannot_be_read_does_not_hide_the_others(monkeypatch) -> None:
    real = sys.modules["torchloom.inspect.record.session"].guards_of

    def sometimes(*args):
        if not broken:
            broken.append(True)
            raise ValueError("a bug of ours")
        return real(*args)

    broken: list[bool] = []
    monkeypatch.setattr("torchloom.inspect.record.session.guards_of", sometimes)
    with torchloom.watch() as w:
        for size in (2, 3):
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(size))
    assert [bool(entry.guards) for entry in w.record.entries()] == [False, True]
    assert w.record.orphans == ["entry 0/0 is incomplete: ValueError"]


def test_lookup_hooks_of_others_go_on_being_asked() -> None:
    from torch._C._dynamo.eval_frame import set_guard_complete_hook

    asked: list[bool] = []

    def others(is_hit: bool) -> bool:
        asked.append(is_hit)
        return True

    compiled = torch.compile(lambda x: x + 1, backend="eager")
    before = set_guard_complete_hook(others)
    try:
        first, second = torchloom.watch(), torchloom.watch()
        first.__enter__()
        second.__enter__()
        compiled(torch.ones(2))
        first.__exit__()  # not the order in which they were opened
        compiled(torch.ones(2))
        second.__exit__()
        compiled(torch.ones(2))
        assert asked == [True, True]
    finally:
        assert set_guard_complete_hook(before) is others


def test_entries_that_are_kept_keep_no_module_and_no_tensor() -> None:
    model, weight = nn.Linear(2, 2), torch.ones(2)
    kept = [weakref.ref(model), weakref.ref(model.weight), weakref.ref(weight)]

    def make(weight):
        return lambda x: x * weight

    compiled = [torch.compile(each, backend="eager") for each in (model, make(weight))]
    found = [
        entry
        for each in compiled
        if each(torch.ones(2)) is not None
        for entry in torchloom.entries(each)
    ]
    del model, weight, compiled
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    assert all(str(entry.guard) for entry in found)
