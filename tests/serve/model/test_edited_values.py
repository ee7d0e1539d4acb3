"""Edited values: constants, containers, types, and what is not there. A stored program is a miss then, or right."""

from __future__ import annotations

import sys

import pytest
import torch

from serve.model.edits import check, pair, top
from serve.models import rows
from torchloom.serve import build, load

CASES: dict[str, tuple[str, str]] = {
    "constant": pair("self.k = 2", "x * self.k", "= 2", "= 3"),
    "sign of zero": pair(
        "self.k = 0.0", "torch.copysign(x, torch.full((), self.k))", "0.0", "-0.0"
    ),
    "absent attribute": pair("pass", "x * getattr(self, 'k', 2)", "pass", "self.k = 3"),
    "key of a dict": pair(
        "self.d = {'a': 1}", "x * (3 if 'b' in self.d else 2)", "'a': 1", "'a': 1, 'b': 1"
    ),
    "identity of two attributes": pair(
        "self.a = nn.Parameter(torch.ones(16)); self.b = self.a",
        "x * (2 if self.a is self.b else 3)",
        "self.b = self.a",
        "self.b = nn.Parameter(torch.ones(16))",
    ),
    "values of a global tensor": top("W = torch.full((16,), 2.0)\n", "x * W", "2.0)", "3.0)"),
    "module list": pair(
        "self.l = nn.ModuleList([nn.ReLU(), nn.Tanh()])",
        "self.l[1](self.l[0](x))",
        "nn.ReLU(), nn.Tanh()",
        "nn.Tanh(), nn.ReLU()",
    ),
    "option of a layer": pair("self.a = nn.LeakyReLU(0.1)", "self.a(x)", "0.1", "0.2"),
    "environment": top("import os\n", "x * float(os.environ.get('LOOM_K', '2'))", "'2'", "'3'"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_edited_value_is_a_miss_or_gives_what_the_edited_model_gives(name, tmp_path):
    check(*CASES[name], tmp_path)


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
