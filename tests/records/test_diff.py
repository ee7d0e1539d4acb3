"""What `diff` tells and what it leaves out: what changed, and nothing that did not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchloom
from torchloom.records import (
    Artifact,
    Break,
    CacheUse,
    Continuation,
    Entry,
    Function,
    Guard,
    Kernel,
    PassRun,
    Recompile,
    Session,
    Span,
)
from torchloom.records.diff import diff

X = torch.ones(4)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def session(*entries: Entry, **fields: Any) -> Session:
    function = Function(name="f", file="a.py", line=1, qualname="f", entries=list(entries))
    return Session(functions=[dataclasses.replace(function, **fields)])


def guard(english: str, text: str = "") -> Guard:
    return Guard(source="L['x']", kind="EQUALS_MATCH", text=text, english=english)


def run_of(name: str) -> PassRun:
    return PassRun(name=name, stage="joint", graph="g", num_edits=1, duration_s=0.1)


REASON = Recompile(entry="0/0", source="x", expected="1", actual="2", text="", fix="")
CHANGES: dict[str, Any] = {
    "backend": "inductor",
    "status": "evicted",
    "guards": [guard("argument x == 1")],
    "artifacts": [Artifact(kind="inference", title="", text="return x")],
    "kernels": [Kernel(name="k", language="C++", source="a")],
    "passes": [run_of("zero1")],
    "recompiles": [REASON],
    "pseudo_source": "return (x, 4)",
    "continuations": [Continuation(name="c", function="f", line=3, source="return 4")],
}
"""A change of each field of an entry that is one of what torch made."""
NO_CHANGES: dict[str, Any] = {
    "compile_id": "7/0",
    "epoch": 3,
    "attempts": 2,
    "trigger": {"x": "== 4"},
    "bytecode": "LOAD_GLOBAL __compiled_fn_9",
    "original_bytecode": "LOAD_FAST",
    "stack": ["b.py:1 in main"],
    "spans": [Span(name="a", start_us=0.0, duration_us=1.0)],
    "caches": [CacheUse(cache="fx_graph", outcome="miss")],
    "metrics": {"compile_s": 60.0},
    "num_hits": 9,
    "is_counted": False,
    "guard_check_us": 4.0,
}
"""Changes that say how the run went. Breaks are compared for the whole record."""


def test_each_field_of_an_entry_is_decided_on() -> None:
    fields = {field.name for field in dataclasses.fields(Entry)}
    assert fields == {*CHANGES, *NO_CHANGES, "breaks"}


@pytest.mark.parametrize("name", [*CHANGES, *NO_CHANGES])
def test_what_a_changed_field_of_an_entry_means(name: str) -> None:
    plain = Entry(compile_id="0/0")
    changed = dataclasses.replace(plain, **{name: {**CHANGES, **NO_CHANGES}[name]})
    found = diff(session(plain), session(changed))
    assert bool(found) is (name in CHANGES), str(found)
    assert bool(diff(session(changed), session(plain))) is (name in CHANGES)


def test_kernels_and_graphs_of_one_number_and_another_text() -> None:
    for field, a, b in (
        ("kernels", *([Kernel(name="k", language="C++", source=s)] for s in ("a", "b"))),
        ("artifacts", *([Artifact(kind="output_code", title="", text=s)] for s in ("a", "b"))),
        (
            "artifacts",  # of two graphs of one kind the first counts as well
            *([Artifact(kind="post_grad", title="", text=s) for s in (t, "z")] for t in ("a", "b")),
        ),
    ):
        one, other = (Entry(compile_id="0/0", **{field: each}) for each in (a, b))
        assert diff(session(one), session(other)), field


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("s == {'b', 'c', 'a'}", "s == {'a', 'b', 'c'}", True),
        ("s == {'a', 'b'}", "s == {'a', 'c'}", False),
        ("s == '{b, a}'", "s == '{a, b}'", False),
        ("global __builtins_dict___1['len']", "global __builtins_dict___7['len']", True),
        ("G['__nested_<id>_c0/0']", "G['__nested_<id>_c3/0']", True),
        ("global __mine_1", "global __mine_2", False),
    ],
)
def test_guards_in_another_order_or_numbering(before: str, after: str, is_same: bool) -> None:
    entries = (Entry(compile_id="0/0", guards=[guard(each, each)]) for each in (before, after))
    found = diff(*map(session, entries))
    assert bool(found) is not is_same, str(found)


def test_lines_that_moved_change_nothing() -> None:
    def moved(line: int) -> Session:
        text = f"# File: a.py:{line} in f, code: x + 1\nadd = x + 1"
        brk = Break(reason="r", explanation="", hints=[], user_stack=[f"a.py:{line} in f"])
        entry = Entry(
            compile_id="0/0", breaks=[brk], artifacts=[Artifact(kind="dynamo", title="", text=text)]
        )
        name = f"torch_dynamo_resume_in_f_at_{line}"
        child = Function(
            name=name, qualname=name, file="a.py", line=line, entries=[Entry(compile_id="1/0")]
        )
        return session(entry, children=[child])

    assert not diff(moved(3), moved(5))
    assert "+ a.py:3 in f: r" in str(diff(session(Entry(compile_id="0/0")), moved(3)))


def test_what_a_cache_kept_from_being_made_is_no_change() -> None:
    cold = Entry(
        compile_id="0/0",
        artifacts=[
            Artifact(kind="pre_grad", title="", text="a"),
            Artifact(kind="output_code", title="", text="b"),
        ],
        kernels=[Kernel(name="k", language="C++", source="a")],
        passes=[run_of("zero1")],
    )
    warm = Entry(compile_id="0/0", caches=[CacheUse(cache="fx_graph", outcome="hit")])
    found = diff(session(cold), session(warm))
    assert not found
    assert "caches unused -> fx_graph hit" in str(found)
    assert diff(session(cold), session(Entry(compile_id="0/0")))


def watched(fn: Callable[..., Any], *args: Any, backend: str = "eager") -> Session:
    torch._dynamo.reset()
    with torchloom.watch() as w:
        torch.compile(fn, backend=backend)(*args)
    return w.record


def measured(x, names):
    return x + len(names) if "beta" in names else x


def test_what_was_compiled_before_changes_no_numbers() -> None:
    first = watched(measured, X, ["beta"])
    watched(lambda x: x + max(1, 2), X)
    again = watched(measured, X, ["beta"])
    assert first["measured"].entries[0].guards != again["measured"].entries[0].guards
    assert not diff(first, again), str(diff(first, again))


def test_another_backend_and_the_graphs_that_it_made() -> None:
    def normed(x):
        return torch.nn.functional.layer_norm(x, (4,))

    with torch.no_grad():
        one, other = (
            watched(normed, X, backend=name) for name in ("aot_eager", "aot_eager_decomp_partition")
        )
    text = str(diff(one, other))
    assert "backend aot_eager -> aot_eager_decomp_partition" in text
    assert "inference graph" in text
