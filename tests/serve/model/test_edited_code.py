"""Edited code and values: a stored program is a miss then, or does what the new code does."""

from __future__ import annotations

import sys

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
    "closure of a factory": top(
        "def make(k):\n    def f(x): return x * k\n    return f\nf = make(2)\n",
        "f(x)",
        "make(2)",
        "make(3)",
    ),
    "base class": (HEAD + BASE, HEAD + BASE.replace("x * 2", "x * 3")),
    "method patched on the instance": (
        HEAD + BASE,
        HEAD + BASE.replace("return Model()", "m = Model(); m.scale = lambda x: x * 3; return m"),
    ),
    "hook": pair(
        "self.a = nn.ReLU()",
        "self.a(x)",
        "self.a = nn.ReLU()",
        "self.a = nn.ReLU(); self.a.register_forward_hook(lambda m, a, y: y * 3)",
    ),
    "constant": pair("self.k = 2", "x * self.k", "= 2", "= 3"),
    "absent attribute": pair("pass", "x * getattr(self, 'k', 2)", "pass", "self.k = 3"),
    "identity of two attributes": pair(
        "self.a = nn.Parameter(torch.ones(16)); self.b = self.a",
        "x * (2 if self.a is self.b else 3)",
        "self.b = self.a",
        "self.b = nn.Parameter(torch.ones(16))",
    ),
    "values of a global tensor": top("W = torch.full((16,), 2.0)\n", "x * W", "2.0)", "3.0)"),
    "environment": top("import os\n", "x * float(os.environ.get('LOOM_K', '2'))", "'2'", "'3'"),
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


REBOUND = torch.full((16,), 2.0)


def with_a_global(x):
    return x * REBOUND


def test_a_global_tensor_that_is_bound_anew_is_the_new_one(tmp_path, monkeypatch):
    program, x = build(with_a_global, rows(), backend="eager", store=tmp_path), torch.randn(3, 16)
    loaded = load(tmp_path, with_a_global, rows())
    with torch.no_grad():
        for value in (3.0, 4.0):
            monkeypatch.setattr(sys.modules[__name__], "REBOUND", torch.full((16,), value))
            torch.testing.assert_close(program(x), x * value)
            torch.testing.assert_close(loaded(x), x * value)
