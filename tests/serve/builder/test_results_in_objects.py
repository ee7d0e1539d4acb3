"""What programs return in objects, and what they leave in attributes, is the model's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from serve.models import rows
from torchloom.errors import ProofError, ServeError
from torchloom.serve import build

X = torch.randn(3, 16)


class Out:
    """Holds a result, itself, and more."""

    def __init__(self, logits):
        self.logits, self.me, self.name = logits, self, "out"


class Slots:
    __slots__ = ("logits",)

    def __init__(self, logits):
        self.logits = logits


class Returns(nn.Module):
    def __init__(self, fn, squeezes=False):
        super().__init__()
        self.fn, self.squeezes, self.last, self.log = fn, squeezes, None, []
        self.inner = nn.Identity()

    def forward(self, x):
        y = x * 2
        found = self.fn(self, y.squeeze() if self.squeezes else y)
        return x + 1 if found is None else found


IN_OBJECTS = {
    "object": lambda m, y: Out(y),
    "object in a tuple": lambda m, y: (y.sum(-1), [Out(y)]),
}
IN_SETS = {"set": lambda m, y: (1, {y}), "slots": lambda m, y: Slots(y)}


@pytest.mark.parametrize("name", [*IN_OBJECTS, *IN_SETS])
def test_they_are_compared_or_refused(name):
    fn = (IN_OBJECTS | IN_SETS)[name]
    text = "set of tensors" if name == "set" else "differs from itself|cannot be"
    with torch.no_grad(), pytest.raises(ServeError, match=text):
        build(Returns(fn, squeezes=True).eval(), rows(), shapes="prove")


@pytest.mark.parametrize("name", [*IN_OBJECTS, *IN_SETS])
def test_buckets_refuse_what_they_cannot_cut(name):
    fn = (IN_OBJECTS | IN_SETS)[name]
    with torch.no_grad(), pytest.raises(ServeError, match=r"cannot be padded|cannot be compared"):
        build(Returns(fn).eval(), rows(), shapes="bucket", sizes=[8, 64], backend="eager")


def in_attribute(m, y):
    m.last = y


def in_a_part(m, y):
    m.inner.last = [y]


def in_a_list(m, y):
    m.log.append(y)


LEFT = [in_attribute, in_a_part]


@pytest.mark.parametrize("fn", LEFT)
def test_what_is_left_behind_is_compared(fn):
    with torch.no_grad(), pytest.raises(ProofError, match="what is left in"):
        build(Returns(fn, squeezes=True).eval(), rows(), shapes="prove")


@pytest.mark.parametrize("fn", LEFT)
def test_what_is_equal_may_be_left_behind(fn):
    model = Returns(fn).eval()
    with torch.no_grad():
        program = build(model, rows(), backend="eager")
        assert model.last is None
        program(X)
    held = [*getattr(model.inner, "last", []), model.last]
    assert torch.equal(held[0], X * 2)


@pytest.mark.parametrize("fn", [*LEFT, in_a_list])
def test_buckets_refuse_padded_rows_that_are_left_behind(fn):
    with torch.no_grad(), pytest.raises(ProofError, match="is not cut, so return it"):
        build(Returns(fn).eval(), rows(), shapes="bucket", sizes=[8, 64], backend="eager")
