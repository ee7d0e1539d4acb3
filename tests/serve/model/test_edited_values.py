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
