"""Reasons of recompiles say what the older entry expects, and advice that fits the cause."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchloom
from torchloom.inspect.wording.reasons import reason_of

X, Y = torch.ones(2), torch.ones(3)


class Colour(enum.Enum):
    RED, BLUE = 1, 2


class Bag:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def recompiled(fn: Callable[..., Any], *calls: tuple[Any, ...]) -> Any:
    """Return why the oldest entry did not serve the last call."""
    with torchloom.watch() as w:
        compiled = torch.compile(fn, backend="eager")
        for call in calls:
            compiled(*call)
    (function,) = w.record.functions
    return function.entries[-1].recompiles[-1]


CASES = {
    "list": (lambda xs: sum(xs), ([X],), ([X, X],), "argument xs", "len 1", "len 2"),
    "dict": (
        lambda d: sum(d.values()), ({"a": X, "b": X},), ({"a": X},),
        "argument d", "len 2", "another length",
    ),
    "empty": (lambda x, xs: x + len(xs), (X, []), (X, [1]), "argument xs", "empty", "not empty"),
    "key": (
        lambda d: d["a"] + len(d), ({"a": X, "b": X},), ({"a": X, "c": X},),
        "argument d", "the key 'b'", "no such key",
    ),
    "none": (
        lambda x, y: x - 1 if y is None else x + y, (X, X), (X, None),
        "argument y", "a tensor of the class that it had", "`NoneType`",
    ),
    "not none": (
        lambda x, y: x + 1 if y is None else x + y, (X, None), (X, X),
        "argument y", "None", "a float32 tensor of shape [2] without grad",
    ),
    "bool": (
        lambda x, b: x + 1 if b else x - 1, (X, True), (X, False), "argument b", "== True", "False",
    ),
    "string": (lambda x, s: x + len(s), (X, "a"), (X, "bb"), "argument s", "== 'a'", "'bb'"),
    "enum": (
        lambda x, e: x + 1 if e is Colour.RED else x - 1, (X, Colour.RED), (X, Colour.BLUE),
        "argument e", "the object that it had", "another object",
    ),
    "attribute": (
        lambda x, bag: x + getattr(bag, "s", 0), (X, Bag()), (X, Bag(s=3)),
        "argument bag", "no attribute 's'", "the attribute 's'",
    ),
    "parameter": (
        lambda x: x + 1, (X,), (nn.Parameter(X),),
        "argument x", "a tensor of the class that it had", "`torch.nn.parameter.Parameter`",
    ),
    "one object": (
        lambda x, y: x + y, (X, X), (X, Y[:2]),
        "argument x", "the same object as argument y", "another object",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_was_expected(name: str) -> None:
    fn, first, second, source, expected, actual = CASES[name]
    reason = recompiled(fn, first, second)
    assert (reason.source, reason.expected, reason.actual) == (source, expected, actual)
    assert "!=" not in reason.expected
    assert reason.fix
    assert "dynamic=True" not in reason.fix


def test_sizes_say_what_the_new_entry_serves() -> None:
    reason = recompiled(lambda x: x + 1, (X,), (Y,))
    assert (reason.expected, reason.actual) == ("size(0) == 2", "3")
    assert reason.fix.startswith("now dynamic: entry 0/1 serves sizes >= 2;")

    def branches(x):
        return x + 1 if x.shape[0] > 4 else x - 1

    torch._dynamo.reset()
    reason = recompiled(branches, (X,), (torch.ones(9),))
    assert "serves sizes >= 5" in reason.fix


FACTOR = 3


def test_numbers_by_where_they_come_from() -> None:
    global FACTOR  # noqa: PLW0603

    def scaled(x):
        return x * FACTOR

    before = FACTOR
    with torchloom.watch() as w:
        compiled = torch.compile(scaled, backend="eager")
        compiled(X)
        FACTOR = 4
        compiled(X)
    FACTOR = before
    (reason,) = w.record.functions[0].entries[1].recompiles
    assert (reason.source, reason.expected, reason.actual) == ("global FACTOR", "== 3", "4")
    assert "pass it as an argument" in reason.fix
    assert "dynamic" not in reason.fix

    def make(scale):
        return lambda x: x * scale

    torch._dynamo.reset()
    with torchloom.watch() as w:
        torch.compile(make(2), backend="eager")(X), torch.compile(make(3), backend="eager")(X)
    (reason,) = w.record.functions[0].entries[1].recompiles
    assert reason.source == "closure variable scale"
    assert "dynamic=True" not in reason.fix
    english = [guard.english for guard in w.record.functions[0].entries[0].guards]
    assert "closure variable scale == 2" in english
    torch._dynamo.reset()
    reason = recompiled(lambda x, n: x * n, (X, 4), (X, 5))
    assert reason.fix == "now dynamic: entry 0/1 serves other integers as well"

    class Scaled(nn.Module):
        scale = 2

        def forward(self, x):
            return x * self.scale

    torch._dynamo.reset()
    module = Scaled()
    with torchloom.watch() as w:
        compiled = torch.compile(module, backend="eager")
        compiled(X)
        module.scale = 3
        compiled(X)
    (reason,) = w.record.functions[0].entries[1].recompiles
    assert "dynamic=True" not in reason.fix


def test_modules_of_torch_are_called_self() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    with torchloom.watch() as w:
        compiled = torch.compile(model, backend="eager")
        compiled(X)
        model.eval()
        compiled(X)
    (function,) = w.record.functions
    (reason,) = function.entries[1].recompiles
    assert (reason.source, reason.expected, reason.actual) == (
        "self.1.training",
        "== True",
        "False",
    )
    assert not any("argument fn" in g.english for e in function.entries for g in e.guards)


@pytest.mark.parametrize(
    ("text", "expected", "actual"),
    [
        ("len(L['d']) != 2", "len 2", "another length"),
        ("not L['xs']", "empty", "not empty"),
        ("KeyError on L['d']['k']", "the key 'k'", "no such key"),
        ("hasattr(L['p'], 's')", "the attribute 's'", "no attribute 's'"),
        ("___check_type_id(L['y'], 12345), type=<class 'int'>", "type `int`", "another type"),
        ("L['y'] is not None", "not None", "None"),
        ('Duplicate tensors found: ["x", "y"]', "different tensors", "one tensor twice"),
        ("GLOBAL_STATE changed: grad_mode", "unchanged global state", "grad_mode"),
        ("(type(L['x']) is float and __math_isnan(L['x']))", "== nan", "another value"),
        ("CodeGuardAccessor: Not a function on h.__code__", "a plain function", "another callable"),
        ("L['n'] != 0", "!= 0", "another value"),
        (
            "_dynamo_dynamic_indices not a subset: runtime {0, 1} is not a subset of compiled {1}",
            "the marks on dims that it had",
            "others",
        ),
        ("KeyError on G['SCALE']", "defined", "not defined"),
        (
            "___check_type_id(fn, 123), type=<class 'nn.Linear'> (HINT: type Linear)",
            "type `nn.Linear`",
            "another type",
        ),
        ("L['g'].scale == 2 (HINT: guard on \"g\".scale)", "== 2", "another value"),
        (
            "tensor 's.w' dtype mismatch. expected Float, actual Double. Guard failed on a parameter, "
            "consider using torch._dynamo.config.force_parameter_static_shapes = False to allow dynamism",
            "dtype Float",
            "Double",
        ),
        (
            "tensor 's.w' size mismatch at index 0. expected 2, actual 3. Guard failed on a parameter, "
            "consider using torch._dynamo.config.force_parameter_static_shapes = False to allow dynamism",
            "size(0) == 2",
            "3",
        ),
        ("(L['x'].size()[0] % 8) == 0", "(L['x'].size()[0] % 8) == 0", ""),
        ("something new", "something new", ""),
    ],
)
def test_sentences(text: str, expected: str, actual: str) -> None:
    reason = reason_of(f"{text}  # a line of code")
    assert (reason.expected, reason.actual) == (expected, actual)


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ("num_threads", "torch.set_num_threads"),
        ("deterministic_algorithms", "torch.use_deterministic_algorithms"),
        ("grad_mode autocast(cpu)_enabled", "grad mode, autocast"),
        ("default_dtype", "the default dtype"),
    ],
)
def test_advice_on_global_state_names_what_changed(changed: str, advice: str) -> None:
    assert (
        reason_of(f"GLOBAL_STATE changed: {changed} ").fix
        == f"keep {advice} the same between calls"
    )
