"""What a model looked for and did not find is a fact, wherever it looked."""

from __future__ import annotations

import pytest
import torch

from serve.model.edits import FORWARD, HEAD, check, pair, top
from torchloom.serve.builder.trace.absent_names import asked_for, listed, missed

TRY = """
import argparse, sys, types
class C:
    def __init__(self):
        self.a = 1
    def method(self): pass
    #C
def function(): pass
def inner(o): return o.k
def outer(o):
    try:
        return inner(o)
    except AttributeError:
        return 2
def get(o):
    try:
        return o.k
    except AttributeError:
        return 2
def count(o): return len(vars(o))
class E(enum.Enum):
    A = 1
def item(d, key):
    try:
        return d[key]
    except KeyError:
        return 2
other = sys.modules["NAME_other"] = types.ModuleType("NAME_other")
#HERE
"""


def after(init: str, value: str, *edit: str) -> tuple[str, str]:
    text = HEAD + TRY + FORWARD % (init, value)
    old, new = edit
    assert old in text
    return text, text.replace(old, new)


HERE = "#HERE"
CASES = {
    "attribute of a module, by its error": after("pass", "x * get(other)", HERE, "other.k = 3"),
    "attribute of a module, by getattr": after(
        "pass", "x * getattr(other, 'k', 2)", HERE, "other.k = 3"
    ),
    "attribute of a module, by hasattr": after(
        "pass", "x * (3 if hasattr(other, 'k') else 2)", HERE, "other.k = 3"
    ),
    "attribute of a namespace": after(
        "self.c = types.SimpleNamespace(a=1)", "x * get(self.c)", "a=1)", "a=1, k=3)"
    ),
    "key of a namespace": after(
        "self.c = argparse.Namespace(a=1)", "x * (3 if 'k' in self.c else 2)", "a=1)", "a=1, k=3)"
    ),
    "attribute of a layer": after(
        "self.c = nn.ReLU()", "x * get(self.c)", "nn.ReLU()", "nn.ReLU(); self.c.k = 3"
    ),
    "attribute of a parameter": after(
        "self.c = nn.Parameter(torch.ones(16))", "x * get(self.c)", "(16))", "(16)); self.c.k = 3"
    ),
    "attribute of a class": after("pass", "x * get(C)", HERE, "C.k = 3"),
    "attribute of a function": after("pass", "x * get(function)", HERE, "function.k = 3"),
    "attribute of a function, by getattr": after(
        "pass", "x * getattr(function, 'k', 2)", HERE, "function.k = 3"
    ),
    "attribute that a helper looks for": after(
        "self.c = C()", "x * outer(self.c)", HERE, "C.k = 3"
    ),
    "attribute that a module makes": after(
        "pass", "x * getattr(other, 'k', 2)", HERE, "other.__getattr__ = lambda name: 3"
    ),
    "attribute of torch's": after(
        "pass", "x * getattr(torch.nn.functional, 'zz', 2)", HERE, "torch.nn.functional.zz = 3"
    ),
    "names that a helper counts": after(
        "self.c = nn.ReLU()", "x * count(self.c)", "nn.ReLU()", "nn.ReLU(); self.c.k = 3"
    ),
    "attribute of a method": after(
        "self.c = C()", "x * (3 if hasattr(self.c.method, 'k') else 2)", "#C", "method.k = 3"
    ),
    "attribute of an object in a slot": top(
        "class S:\n    __slots__ = ('k',)\nS1 = S()\n" + TRY, "x * get(S1)", HERE, "S1.k = 3"
    ),
    "attribute by one of several names": after(
        "pass", "x * sum(getattr(other, n, 2) for n in ('k', 'z'))", HERE, "other.k = 3"
    ),
    "key of vars of a module": pair(
        "self.k = 2", "x * (3 if 'z' in vars(self) else 2)", "= 2\n", "= 2; self.z = 1\n"
    ),
    "key of vars of an object": after(
        "self.c = C()", "x * vars(self.c).get('z', 2)", "self.a = 1", "self.a = 1; self.z = 7"
    ),
    "number of attributes": after(
        "self.c = C()", "x * len(self.c.__dict__)", "self.a = 1", "self.a = 1; self.z = 7"
    ),
    "attributes that are gone through": after(
        "self.c = C()", "x * sum(vars(self.c).values())", "self.a = 1", "self.a = 1; self.z = 7"
    ),
    "own attributes that are gone through": pair(
        "self.k1 = 2",
        "x * sum(v for k, v in self.__dict__.items() if k.startswith('k'))",
        "= 2",
        "= 2; self.k2 = 4",
    ),
    "key in an ordered dict": after(
        "self.d = collections.OrderedDict(a=1)", "x * item(self.d, 'k')", "a=1)", "a=1, k=7)"
    ),
    "key in a default dict": after(
        "self.d = collections.defaultdict(None, a=1)", "x * item(self.d, 'k')", "a=1)", "a=1, k=7)"
    ),
    "key among numbers": after(
        "self.d = {0: 1}", "x * item(self.d, 'k')", "{0: 1}", "{0: 1, 'k': 7}"
    ),
    "function of torch's": after(
        "pass", "x * (3 if hasattr(other.F, 'zz') else 2)", HERE, "other.F.zz = 3"
    ),
}
for KEY in ("5", "(1, 2)", "E.A", "None", ".5", "int", "b'a'", "torch.float32"):
    CASES[f"key {KEY}"] = after(
        "self.d = {0: 1}", f"x * item(self.d, {KEY})", "{0: 1}", f"{{0: 1, {KEY}: 7}}"
    )
CASES["function of torch's"] = tuple(
    text.replace("other = sys", "sys").replace("other.F", "F")
    for text in CASES["function of torch's"]
)


@pytest.mark.parametrize("name", CASES)
def test_what_was_not_there_and_is_now(name, tmp_path):
    try:
        assert check(*CASES[name], tmp_path) is None
    finally:
        vars(torch.nn.functional).pop("zz", None)


BESIDE = {
    "another attribute of a module": after("pass", "x * get(other)", HERE, "other.z = 3"),
    "another attribute of a class": after("pass", "x * getattr(C, 'k', 2)", HERE, "C.z = 3"),
    "an attribute of another object": after(
        "self.c = C()", "x * len(vars(self.c))", HERE, "function.k = 3"
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_nobody_looked_for_may_come(name, tmp_path):
    assert check(*BESIDE[name], tmp_path) is not None


def asks(self, o):
    import collections.abc as names

    return (
        hasattr(self.config, "one"),
        getattr(o, "two", "three"),
        hasattr(names, "four"),
        getattr(o["five"], "six", None),
    )


def catches(o, self):
    try:
        return o.one + self.config.two
    except AttributeError:
        return 0


def lists(self, o):
    return vars(self), o.__dict__, vars(self.config), vars(o["a"])


def test_names_are_told_with_what_they_are_looked_for_in():
    assert {("config", "one"), (None, "two"), ("abc", "four")} <= asked_for(asks.__code__)
    assert (None, "six") in asked_for(asks.__code__)
    assert missed([catches.__code__]) == {(None, "one"), (None, "config"), ("config", "two")}
    assert not missed([asks.__code__])
    assert listed(lists.__code__) == {"self", None, "config"}
