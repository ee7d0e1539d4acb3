"""What code asks classes is a fact: who belongs to them, members of enums, annotations, methods that no trace shows."""

from __future__ import annotations

import pytest
from torch import nn

from serve.model.edits import FORWARD, HEAD, check

KINDS = """
import abc, collections.abc, inspect, numbers, typing
class B(abc.ABC):
    @classmethod
    def __subclasshook__(cls, other): return NotImplemented
class C:
    def stay(self): return 1
@typing.runtime_checkable
class P(typing.Protocol):
    def go(self): ...
ANSWER = False
class Meta(type):
    def __instancecheck__(cls, other): return ANSWER
    def __subclasscheck__(cls, other): return ANSWER
class M(metaclass=Meta): pass
class Number: pass
class E(enum.Enum):
    A = 1
    B = 2
    @classmethod
    def _missing_(cls, value): return cls.A
class Item:
    def __class_getitem__(cls, key): return key * 2
def function(a: float): pass
ABSTRACT = (int, B)
#HERE
"""


def edit(value: str, old: str, new: str) -> tuple[str, str]:
    text = HEAD + KINDS + FORWARD % ("self.c = C(); self.v = 1", value)
    assert old in text
    return text, text.replace(old, new)


def asked(call: str, old: str, new: str) -> tuple[str, str]:
    return edit(f"x * (3 if {call} else 2)", old, new)


HERE = "#HERE"
CASES = {
    "registered": asked("isinstance(self.c, B)", HERE, "B.register(C)"),
    "registered class": asked("issubclass(C, B)", HERE, "B.register(C)"),
    "registered in one of several": asked("isinstance(self.c, (int, B))", HERE, "B.register(C)"),
    "registered in one of a tuple": asked("isinstance(self.c, ABSTRACT)", HERE, "B.register(C)"),
    "registered in one of a union": asked("isinstance(self.c, int | B)", HERE, "B.register(C)"),
    "registered as a mapping": asked(
        "isinstance(self.c, collections.abc.Mapping)", HERE, "collections.abc.Mapping.register(C)"
    ),
    "registered as a number": asked(
        "isinstance(self.c, numbers.Number)", HERE, "numbers.Number.register(C)"
    ),
    "hook": asked("isinstance(self.c, B)", "return NotImplemented", "return True"),
    "protocol": asked("isinstance(self.c, P)", "def stay", "def go"),
    "method of a metaclass": asked("isinstance(self.c, M)", "ANSWER = False", "ANSWER = True"),
    "another method of a metaclass": asked("issubclass(C, M)", "ANSWER = False", "ANSWER = True"),
    "no longer hashable": asked(
        "isinstance(self.c, collections.abc.Hashable)", "def stay", "__hash__ = None\n    def stay"
    ),
    "name of a member": edit("x * len(E(self.v).name)", "A = 1", "AAA = 1"),
    "value of a member": edit("x * E['A'].value", "A = 1", "A = 5"),
    "member that is missing": edit("x * E(7).value", "return cls.A", "return cls.B"),
    "annotation": asked("function.__annotations__['a'] is int", "a: float", "a: int"),
    "annotation of a signature": asked(
        "inspect.signature(function).parameters['a'].annotation is int", "a: float", "a: int"
    ),
    "type hint": asked("typing.get_type_hints(function)['a'] is int", "a: float", "a: int"),
    "item of a class": edit("x * Item[3]", "key * 2", "key * 3"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_that_is_another_one_is_a_miss(name, tmp_path):
    register = nn.Module.__call__
    try:
        assert check(*CASES[name], tmp_path) is None
    finally:
        nn.Module.__call__ = register


BESIDE = {
    "annotation that nobody reads": edit(
        "x * (2 if function is None else 3)", "a: float", "a: int"
    ),
    "class that nobody asks": edit("x * self.v", HERE, "B.register(C)"),
    "another class": asked("isinstance(self.c, B)", HERE, "B.register(Item)"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_nobody_asked_may_change(name, tmp_path):
    assert check(*BESIDE[name], tmp_path) is not None


PATCHED = HEAD + "#HERE\n" + FORWARD % ("self.a = nn.ReLU()", "self.a(x)")


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_a_method_of_torchs_that_is_replaced_is_a_miss(name, tmp_path, monkeypatch):
    monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))  # put back afterwards
    text = f"nn.Module.{name} = lambda self, x: x * 5 if type(self) is nn.ReLU else self.forward(x)"
    assert check(PATCHED, PATCHED.replace("#HERE", text), tmp_path) is None
