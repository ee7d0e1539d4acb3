"""Pseudo-source: what Dynamo wrote as calls, branches and the user's lines; anything else as text all the same."""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import types

import pytest
import torch
from torch._dynamo.convert_frame import register_bytecode_hook

import torchloom
from torchloom.inspect.pseudo import bytecode_listing, pseudo_source
from torchloom.inspect.pseudo.source import without_ids
from torchloom.inspect.wording.english import without_addresses
from torchloom.records import to_json

ADDRESS = re.compile(r"\d{12,}|0x[0-9a-f]{6,}")
X = torch.arange(1.0, 5.0)


def texts_of(fn, *args) -> list[str]:
    """Return the text of what Dynamo makes of a function, and then of what follows its graph breaks."""
    seen = []
    handle = register_bytecode_hook(lambda old, new: seen.append((old, new)))
    try:
        torch.compile(fn, backend="eager")(*args)
    finally:
        handle.remove()
    return [pseudo_source(new, old.co_name, original=old) for old, new in seen]


def continued(fn) -> list[str]:
    return [each.source for each in torchloom.entries(fn)[0].continuations]


def test_a_graph_call_names_its_arguments_and_what_is_returned() -> None:
    def scaled(inputs, *, n=2):
        return {"out": inputs["x"] * inputs["y"] + n, "n": (n, inputs["x"])}

    (text,) = texts_of(scaled, {"x": X, "y": X.clone()})
    lines = text.splitlines()
    assert lines[0] == "def scaled(inputs, *, n):"
    assert re.fullmatch(
        r"    graph_out_0 = __compiled_fn_\d+\(inputs\['x'\], inputs\['y'\]\)", lines[1]
    )
    assert lines[2:] == ["    return {'out': graph_out_0[0], 'n': (n, inputs['x'])}"]


def test_a_branch_shows_its_condition_its_line_and_both_continuations() -> None:
    def branch(x, y):
        x = x + 1
        if x.mean() > 0.5:
            x = x / 1.1
        return x * y

    text, _ = texts_of(branch, X, X)
    *_, line, condition, taken, other = text.splitlines()
    assert (line, condition) == ("    # if x.mean() > 0.5:", "    if graph_out_0[0]:")
    assert taken.startswith("        return __resume_at_")
    assert taken.endswith("graph_out_0[1], y)")
    assert other.startswith("    return __resume_at_")
    first, second = continued(branch)
    assert first.splitlines()[1:] == ["        x = x / 1.1", "    return x * y"]
    assert second.splitlines()[1:] == ["    return x * y"]


def test_a_break_shows_the_call_the_users_line_and_what_is_resumed() -> None:
    def broken(x, n):
        y = x + 1
        torch._dynamo.graph_break()
        for i in range(n):
            y = y * i
            print(i)
        return y

    text, *_ = texts_of(broken, X, 2)
    assert "    # torch._dynamo.graph_break()\n    t1 = torch._dynamo.graph_break()" in text
    assert text.splitlines()[-1].startswith("    return __resume_at_")
    assert "t1, " in text.splitlines()[-1]
    (rest,) = continued(broken)
    body = ["for i in range(n):", "    y = y * i", "    print(i)", "return y"]
    assert rest.splitlines()[1:] == [f"    {line}" for line in body]


def test_with_and_try() -> None:
    def guarded(x):
        with torch.no_grad():
            y = x + 1
            torch._dynamo.graph_break()
            z = y + 2
        try:
            return z.tolist()
        except ValueError:
            return None

    first, second = texts_of(guarded, X)
    assert ".__enter__()" in first
    assert first.endswith("# exception handlers are not shown")
    assert "__compiled_fn_" in second
    assert "    return z.tolist()" in second  # Dynamo leaves the user's own code behind the graph
    (rest,) = continued(guarded)
    assert "except ValueError:" in rest
    assert "return None" in rest


def test_a_closure_is_handed_to_what_follows_a_break() -> None:
    k = 2

    def counted(x):
        nonlocal k
        k = k + 1
        y = x + k
        torch._dynamo.graph_break()
        return y + k, lambda q: q + k

    first, second = texts_of(counted, X)
    assert "    k = 3\n" in first
    assert re.search(r"return __resume_at_\w+\(\(k,\)\)\(", first)
    assert "<code <lambda>>" in second
    (rest,) = continued(counted)
    assert rest.endswith("    return y + k, lambda q: q + k")


def test_without_source_the_instructions_are_shown() -> None:
    found: dict = {}
    exec(
        compile("def fn(items):\n    for i in items:\n        yield i\n", "no file", "exec"), found
    )
    text = pseudo_source(found["fn"].__code__)
    assert text.startswith("def fn(items):")
    assert "# YIELD_VALUE" in text
    assert "# FOR_ITER" in text


@pytest.mark.parametrize("module", [argparse])
def test_total_over_the_standard_library(module) -> None:
    for value in vars(module).values():
        for fn in vars(value).values() if isinstance(value, type) else [value]:
            if isinstance(fn, types.FunctionType):
                for original in (None, fn.__code__):
                    text = pseudo_source(fn.__code__, original=original)
                    assert text.startswith(("def ", "async def ")), text


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python itself crashes as it makes such code"
)
def test_broken_bytecode_is_still_text() -> None:
    code = test_with_and_try.__code__
    for broken in (bytes([255, 0, 254, 3]) + code.co_code, b"\x64\x00" * 3):
        for original in (None, code):
            text = pseudo_source(code.replace(co_code=broken), original=original)
            assert isinstance(text, str)
            assert len(text) > 10


def test_no_addresses_in_records_and_sources() -> None:
    def with_a_queue(x):
        return collections.deque([x, x * 2], maxlen=3), lambda: 1

    compiled = torch.compile(with_a_queue, backend="eager")
    with torchloom.watch() as w:
        compiled(X)
    entry = next(iter(w.record.entries()))
    for text in (entry.pseudo_source, entry.bytecode):
        assert "___module_deque_" in text
    assert not re.search(r"___module_\w*\d{12}", json.dumps(to_json(w.record)))
    for live in torchloom.entries(compiled):
        assert not ADDRESS.search(live.source)
        assert not ADDRESS.search(live.bytecode)
    assert not ADDRESS.search(bytecode_listing(with_a_queue.__code__))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("___module_deque_140586701475392_c1(x)", "___module_deque_<id>_c1(x)"),
        ("L['x'] is 140586701475392", "L['x'] is <id>"),
        ("__obj_140586701475392", "__obj_<id>"),
        ("a140586701475392b", "a140586701475392b"),
        ("x == 1405867", "x == 1405867"),
        ("__compiled_fn_1_01ff8736_ff4f_4757_94c3_154291234634(x)", "__compiled_fn_1(x)"),
    ],
)
def test_addresses_in_names(text: str, shown: str) -> None:
    assert without_addresses(text) == shown


def test_names_with_different_addresses_stay_different() -> None:
    names = ["a_140586701475392_c1", "a_140586701475393_c1", "x"]
    assert without_ids(names) == ("a_id1_c1", "a_id2_c1", "x")
    assert without_ids(["__compiled_fn_1_01ff8736_ff4f_4757_94c3_154291234634"]) == (
        "__compiled_fn_1",
    )
