"""Edited code: functions, classes and what wraps them. A stored program is a miss then, or does what the new code does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from serve.model.edits import FORWARD, HEAD, check, pair, top
from serve.models import BATCH, rows
from torchloom.errors import ArtifactError
from torchloom.serve import Contract, build, load

BASE = """
class Base(nn.Module):
    def scale(self, x):
        return x * 2
    def forward(self, x):
        return self.scale(x)
class Model(Base):
    pass
def model():
    return Model()
"""
CASES: dict[str, tuple[str, str]] = {
    "function": top("def f(x): return x * 2\n", "f(x)", "x * 2", "x * 3"),
    "default of a function": top("def f(x, k=2): return x * k\n", "f(x)", "k=2", "k=3"),
    "nested function": top(
        "def f(x):\n    def g(y): return y * 2\n    return g(x)\n", "f(x)", "y * 2", "y * 3"
    ),
    "lambda": pair("self.f = lambda x: x * 2", "self.f(x)", "x * 2", "x * 3"),
    "two lambdas of a line": pair(
        "self.fs = [lambda x: x * 2, lambda x: x * 3]; self.f = self.fs[0]",
        "self.f(x)",
        "self.f = self.fs[0]",
        "self.f = self.fs[1]",
    ),
    "closure of a factory": top(
        "def make(k):\n    def f(x): return x * k\n    return f\nf = make(2)\n",
        "f(x)",
        "make(2)",
        "make(3)",
    ),
    "function in a cell": top(
        "def a(x): return x * 2\ndef b(x): return x * 3\ndef make(k):\n    def f(x): return k(x)\n    return f\nf = make(a)\n",
        "f(x)",
        "make(a)",
        "make(b)",
    ),
    "partial": top(
        "def f(k, x): return x * k\nf = functools.partial(f, 2)\n", "f(x)", "(f, 2)", "(f, 3)"
    ),
    "decorator": top(
        "def deco(f):\n    @functools.wraps(f)\n    def g(x): return f(x) * 2\n    return g\n@deco\ndef f(x): return x + 1\n",
        "f(x)",
        "f(x) * 2",
        "f(x) * 3",
    ),
    "what a decorator wraps": top(
        "def deco(f):\n    @functools.wraps(f)\n    def g(x): return f(x) * 2\n    return g\n@deco\ndef f(x): return x + 1\n",
        "f(x)",
        "x + 1",
        "x + 2",
    ),
    "replaced after its definition": top(
        "def f(x): return x * 2\ndef g(x): return x * 3\n",
        "f(x)",
        "return x * 3\n",
        "return x * 3\nf = g\n",
    ),
    "code is replaced": top(
        "def f(x): return x * 2\ndef g(x): return x * 3\n",
        "f(x)",
        "return x * 3\n",
        "return x * 3\nf.__code__ = g.__code__\n",
    ),
    "base class": (HEAD + BASE, HEAD + BASE.replace("x * 2", "x * 3")),
    "override": (
        HEAD + BASE,
        HEAD + BASE.replace("    pass\n", "    def scale(self, x):\n        return x * 3\n"),
    ),
    "another base": (
        HEAD + BASE,
        HEAD
        + BASE.replace(
            "class Model(Base)",
            "class Other(nn.Module):\n    def scale(self, x):\n        return x * 3\nclass Model(Other, Base)",
        ),
    ),
    "method patched on the class": (
        HEAD + BASE,
        HEAD + BASE + "Base.scale = lambda self, x: x * 3\n",
    ),
    "method patched on the instance": (
        HEAD + BASE,
        HEAD + BASE.replace("return Model()", "m = Model(); m.scale = lambda x: x * 3; return m"),
    ),
    "class made by type": (
        HEAD
        + "def forward(self, x): return x * 2\nModel = type('Model', (nn.Module,), {'forward': forward})\ndef model(): return Model()\n",
        HEAD
        + "def forward(self, x): return x * 3\nModel = type('Model', (nn.Module,), {'forward': forward})\ndef model(): return Model()\n",
    ),
    "class method patched": top(
        "class C:\n    @classmethod\n    def f(cls, x): return x * 2\n",
        "C.f(x)",
        "return x * 2\n",
        "return x * 2\nC.f = classmethod(lambda cls, x: x * 3)\n",
    ),
    "property": top(
        "class C:\n    @property\n    def k(self): return 2\nc = C()\n",
        "x * c.k",
        "return 2",
        "return 3",
    ),
    "operator of an object": top(
        "class C:\n    def __init__(self): self.a = 1\n    def __call__(self, x): return x * 2\nc = C()\n",
        "c(x)",
        "x * 2",
        "x * 3",
    ),
    "getattr of an object": top(
        "class C:\n    def __getattr__(self, name): return 2\nc = C()\n",
        "x * c.k",
        "return 2",
        "return 3",
    ),
    "truth of an object": top(
        "class C:\n    def __init__(self): self.a = 1\nc = C()\n",
        "x * (2 if c else 3)",
        "self.a = 1\n",
        "self.a = 1\n    def __bool__(self): return False\n",
    ),
    "object of another class": top(
        "class A:\n    def f(self, x): return x * 2\nclass B:\n    def f(self, x): return x * 3\nc = A()\n",
        "c.f(x)",
        "c = A()",
        "c = B()",
    ),
    "one of two classes of one name": top(
        "def make(k):\n    class C:\n        def f(self, x): return x * k\n    return C\nc = make(2)()\n",
        "c.f(x)",
        "make(2)",
        "make(3)",
    ),
    "method of a metaclass": top(
        "class Meta(type):\n    def f(cls, x): return x * 2\nclass C(metaclass=Meta): pass\nc = C()\n",
        "type(c).f(x)",
        "x * 2",
        "x * 3",
    ),
    "hook": pair(
        "self.a = nn.ReLU()",
        "self.a(x)",
        "self.a = nn.ReLU()",
        "self.a = nn.ReLU(); self.a.register_forward_hook(lambda m, a, y: y * 3)",
    ),
    "another hook": pair(
        "self.a = nn.ReLU(); self.a.register_forward_hook(lambda m, a, y: y * 2)",
        "self.a(x)",
        "y * 2",
        "y * 3",
    ),
    "constant result": top(
        "@torch.compiler.assume_constant_result\ndef k(): return 2\n",
        "x * k()",
        "return 2",
        "return 3",
    ),
    "method of a builtin class": pair(
        "self.f = torch.Tensor.relu", "self.f(x)", "Tensor.relu", "Tensor.tanh"
    ),
    "order of hooks": pair(
        "self.a = nn.ReLU(); self.a.register_forward_hook(lambda m, a, y: y * 2); "
        "self.a.register_forward_hook(lambda m, a, y: y + 1)",
        "self.a(x)",
        "lambda m, a, y: y + 1",
        "lambda m, a, y: y + 1, prepend=True",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_edited_code_is_a_miss_or_gives_what_the_edited_model_gives(name, tmp_path):
    check(*CASES[name], tmp_path)


PATCHED = HEAD + "#HERE\n" + FORWARD % ("self.a = nn.ReLU()", "self.a(x)")


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_a_method_of_torchs_that_is_replaced_is_a_miss(name, tmp_path, monkeypatch):
    monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))  # put back afterwards
    text = f"nn.Module.{name} = lambda self, x: x * 5 if type(self) is nn.ReLU else self.forward(x)"
    assert check(PATCHED, PATCHED.replace("#HERE", text), tmp_path) is None


def test_a_method_that_a_library_adds_to_torchs_modules_is_no_edit(tmp_path, monkeypatch):
    """As `from_pretrained` of transformers adds `smart_apply`, in processes that call it."""
    model = nn.Linear(16, 4).eval()
    contract = Contract({"input": (BATCH, 16)})
    build(model, contract, backend="eager", store=tmp_path)
    monkeypatch.setattr(nn.Module, "smart_apply", lambda self, fn: self, raising=False)
    assert load(tmp_path, model, contract).origin == "loaded"


NOTEBOOK = """
class Model(nn.Module):
    def forward(self, x):
        return helped(x) * K
def helped(x):
    return x + 1
K = 2
"""


@pytest.mark.parametrize("name", ["__main__", "nowhere", None])
def test_code_without_a_file(name, tmp_path):
    """As in notebooks: each cell is executed, and nothing says where its code is from."""

    def cell(text):
        scope = {} if name is None else {"__name__": name}
        exec(HEAD + text, scope)
        return scope["Model"]().eval()

    x = torch.randn(3, 16)
    with torch.no_grad():
        program = build(cell(NOTEBOOK), rows(), backend="eager", store=tmp_path)
        torch.testing.assert_close(program(x), (x + 1) * 2)
        if not program.variants[0].why_not_stored:
            torch.testing.assert_close(load(tmp_path, cell(NOTEBOOK))(x), (x + 1) * 2)
        for old, new in (("x + 1", "x + 2"), ("K = 2", "K = 3"), ("(x) * K", "(x) / K")):
            with pytest.raises(ArtifactError):
                load(tmp_path, cell(NOTEBOOK.replace(old, new)))
