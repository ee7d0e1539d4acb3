"""Operators of users' own are compared by what a trace sees of them: schema and fake implementation."""

from __future__ import annotations

import itertools
import sys

import pytest
from torch import nn

from serve.model.edits import HEAD, made
from serve.models import rows
from torchloom.errors import ArtifactError
from torchloom.serve import build, load

OPERATOR = """
def outer(x):
    return inner(x)
def inner(x):
    return torch.empty_like(x, dtype=KIND)
KIND = torch.float32
@torch.library.custom_op("NAME::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return (x * by).to(KIND)
@scaled.register_fake
def _(x, by=2.0):
    return torch.empty_like(x, dtype=torch.float32)
library = torch.library.Library("NAME", "FRAGMENT")
library.define("plain(Tensor x) -> Tensor")
library.impl("plain", lambda x: x * 2, "CPU")
@torch.library.register_fake("NAME::plain", lib=library)
def _(x):
    return outer(x)
class Model(nn.Module):
    def forward(self, x):
        return torch.ops.NAME.plain(x) + scaled(x)
def model():
    return Model()
"""
EDITS = {
    "fake": ("empty_like(x, dtype=torch.float32)", "empty_like(x, dtype=torch.float64)"),
    "default of its schema": ("by: float = 2.0", "by: float = 3.0"),
    "what it writes": ("mutates_args=()", "mutates_args=('x',)"),
}
COUNT = itertools.count()


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_operator_is_a_miss(name, tmp_path):
    module = f"operators_{next(COUNT)}"
    text = HEAD + OPERATOR.replace("NAME", module)
    old, new = EDITS[name]
    assert old in text

    def model(source: str) -> nn.Module:
        if module in sys.modules:
            sys.modules[module].library._destroy()  # operators are the process's
        return made(source, module)

    program = build(model(text), rows(), backend="eager", store=tmp_path / "store")
    assert not program.variants[0].why_not_stored
    load(tmp_path / "store", model(text))
    kernel = text.replace("return (x * by)", "return (by * x)")  # runs as it is, whatever it is
    load(tmp_path / "store", model(kernel))
    with pytest.raises(ArtifactError, match="operator"):
        load(tmp_path / "store", model(text.replace(old, new)))
