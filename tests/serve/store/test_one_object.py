"""Which of a model's objects are one object is part of what a stored program relies on, either way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from serve.models import rows
from torchloom.errors import ArtifactError
from torchloom.serve import build, load


class Thing:
    def __init__(self) -> None:
        self.k = 1.0


MAKERS = {
    "parts": nn.ReLU,
    "parts with weights": lambda: nn.Linear(16, 16),
    "objects": Thing,
    "lists": lambda: [1, 2],
    "dicts": lambda: {"a": 1},
    "buffers": lambda: nn.Buffer(torch.ones(16)),
    "plain tensors": lambda: torch.ones(16),
}


class Two(nn.Module):
    def __init__(self, kind: str, *, is_one: bool) -> None:
        super().__init__()
        self.kind, self.a = kind, MAKERS[kind]()
        self.b = self.a if is_one else MAKERS[kind]()
        self.held = [self.a, self.a if is_one else MAKERS[kind]()] if kind == "objects" else [1]

    def forward(self, x):
        y = x * (2 if self.a is self.b else 3)
        if self.kind.startswith("parts"):
            return self.b(self.a(y))
        if self.kind == "objects":
            return y * self.a.k * self.b.k * (5 if self.held[0] is self.held[1] else 7)
        return (
            y + self.a + self.b
            if isinstance(self.a, torch.Tensor)
            else y * len(self.a) * len(self.b)
        )


@pytest.mark.parametrize("is_one", [True, False])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_model_whose_objects_are_one_otherwise_is_a_miss(kind, is_one, tmp_path):
    with torch.no_grad():
        x, first = torch.randn(3, 16), Two(kind, is_one=is_one).eval()
        build(first, rows(), backend="eager", store=tmp_path)
        again = Two(kind, is_one=is_one).eval()
        torch.testing.assert_close(load(tmp_path, again)(x), again(x))
        with pytest.raises(ArtifactError):
            load(tmp_path, Two(kind, is_one=not is_one).eval())
