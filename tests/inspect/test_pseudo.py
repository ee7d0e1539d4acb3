"""Pseudo-source: readable where the bytecode is ordinary, and text whatever it is."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import logging
import sys
import types
import typing

import pytest

from torchloom.inspect.pseudo import pseudo_source


def text_of(fn) -> str:
    return pseudo_source(fn.__code__, "f")


def branch(inputs):
    x = inputs["x"]
    y = inputs["y"]
    if x.mean() > 0.5:
        x = x / 1.1
    return x * y


def test_branches_become_a_tree() -> None:
    text = text_of(branch)
    assert "x = inputs['x']" in text
    assert "if x.mean() > 0.5:\n        x = x / 1.1\n        return x * y\n    return x * y" in text


def test_both_sides_run_as_written() -> None:
    """What is printed for code without loops and handlers is Python that computes the same."""

    def fn(a, b, flag=None):
        c = [a, b, *range(a)]
        d = {"k": c, "n": -a}
        c.append(d["n"] + b * 2 - (a - b))
        if flag is None:
            return c, d["k"][0], c[1:], f"{a}-{b:>4}"
        if not flag and a < b:
            d["extra"] = (a,)
            return dict(d, more=b)
        c[0] += 5
        return max(c, key=lambda v: -v) if False else max(c[0], b)

    found: dict[str, object] = {}
    exec(
        compile(ast.parse(text_of(fn).replace("(a, b, flag)", "(a, b, flag=None)")), "x", "exec"),
        found,
    )
    for args in [(1, 2), (3, 2), (1, 2, True), (1, 5, False), (5, 1, False)]:
        assert found["f"](*args) == fn(*args), args


def test_order_of_effects_is_kept() -> None:
    def fn(x):
        old = x[0]
        first = (x.pop(), old, x.pop())
        x[0] = old
        return first, x[0]

    found: dict[str, object] = {}
    exec(text_of(fn), found)
    assert found["f"]([1, 2, 3, 4]) == fn([1, 2, 3, 4])


def test_values_that_wait_on_the_stack_are_settled_before_a_call() -> None:
    def fn(x):
        return [x[0], x.append(9), x[-1], len(x)]

    found: dict[str, object] = {}
    exec(text_of(fn), found)
    assert found["f"]([1]) == fn([1])


def test_loops_and_handlers() -> None:
    def fn(items):
        total = 0
        for item in items:
            if item < 0:
                continue
            total += item
        while total > 10:
            total -= 3
        try:
            total.missing()
        finally:
            total = -total
        return total

    text = text_of(fn)
    assert "for t1 in items:" in text
    assert "while True:" in text
    assert "# exception handlers are not shown" in text


def test_parameters() -> None:
    def fn(a, b, *args, c, **kwargs):
        return a

    assert text_of(fn).startswith("def f(a, b, *args, c, **kwargs):")


def test_no_addresses() -> None:
    def fn():
        return lambda: 1

    assert "0x" not in text_of(fn)


@pytest.mark.parametrize(
    "module", [json, inspect, argparse, typing, dataclasses, logging, difflib, ast]
)
def test_total_over_the_standard_library(module) -> None:
    count = 0
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else [value]
        for fn in members:
            if isinstance(fn, types.FunctionType):
                text = pseudo_source(fn.__code__)
                assert text.startswith(("def ", "async def ")), text
                assert len(text) > 10
                count += 1
    assert count > 5


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python itself crashes as it makes such code"
)
def test_broken_bytecode_is_still_text() -> None:
    code = branch.__code__.replace(co_code=bytes([255, 0, 254, 3]) + branch.__code__.co_code)
    assert isinstance(pseudo_source(code), str)
    empty = branch.__code__.replace(co_code=b"\x64\x00" * 3)
    assert isinstance(pseudo_source(empty), str)


def test_what_dynamo_writes() -> None:
    import torch
    from torch._dynamo.convert_frame import register_bytecode_hook

    seen = []
    handle = register_bytecode_hook(lambda old, new: seen.append(new))
    try:
        inputs = {"x": torch.rand(10), "y": torch.rand(10)}
        torch._dynamo.reset()
        torch.compile(branch, backend="eager")(inputs)
    finally:
        handle.remove()
        torch._dynamo.reset()
    text = pseudo_source(seen[0], "branch")
    assert "__compiled_fn_" in text
    assert text.count("return __resume_at_") == 2
    assert "<?>" not in text
    assert "\n    # " not in text.replace("# exception handlers", "")
