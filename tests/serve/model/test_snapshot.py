"""Building leaves no trace: the model and the process are as they were before."""

from __future__ import annotations

import collections
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from serve.models import BATCH, rows
from torchloom.errors import ServeError
from torchloom.serve import Contract, build, tensor

X = torch.randn(3, 16)
CALLS, TABLE, MEMORY = [], {"n": 0}, torch.zeros(16)


class Remembers(nn.Module):
    """Keeps what it saw in buffers and in plain tensors, wherever they are held."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(16))
        self.cache = torch.zeros(16)
        self.several = [torch.zeros(16)]
        self.named = {"one": torch.zeros(16)}

    def forward(self, x):
        for each in (self.buffer, self.cache, self.several[0], self.named["one"]):
            each.add_(x.sum(0))
        return x + self.buffer + self.cache + self.several[0] + self.named["one"]

    def held(self):
        return (self.buffer, self.cache, self.several[0], self.named["one"])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_buffers_and_plain_tensors_are_as_before_and_then_kept_by_calls(backend):
    model, twin = Remembers().eval(), Remembers().eval()
    with torch.no_grad():
        program = build(model, rows(), backend=backend)
        assert all(not each.any() for each in model.held())
        for _ in range(3):
            torch.testing.assert_close(program(X), twin(X))
        for one, other in zip(model.held(), twin.held(), strict=True):
            torch.testing.assert_close(one, other)


def test_generators_are_as_before():
    class Drops(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.0, True) + 0 * torch.rand(x.shape[0], 1)

    def drawn():
        return torch.rand(3), random.random(), np.random.rand(3)  # noqa: NPY002 - the shared generator

    def seed():
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002

    seed()
    wanted = drawn()
    seed()
    with torch.no_grad():
        build(Drops().eval(), rows(), backend="eager")
    for one, other in zip(wanted, drawn(), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("wants", [False, True])
def test_an_argument_gets_its_gradient(wants):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    program = build(model, Contract({"input": tensor(BATCH, 16)}, grad="grad"))
    found, wanted = (X.clone().requires_grad_(wants) for _ in "ab")
    program(found).square().sum().backward()
    ours = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    model(wanted).square().sum().backward()
    for param, grad in zip(model.parameters(), ours, strict=True):
        torch.testing.assert_close(grad, param.grad)
    assert (found.grad is None) is not wants
    if wants:
        torch.testing.assert_close(found.grad, wanted.grad)


class Plain:
    """Keeps things in its attributes."""

    def __init__(self):
        self.n, self.deep = 0, {"a": [0]}


class Everywhere(nn.Module):
    """Changes what it holds, where it is not compiled."""

    def __init__(self):
        super().__init__()
        self.plain = Plain()
        self.nested = [{"a": 0}]
        self.ordered = collections.OrderedDict(a=1, b=2)
        self.names = {1, 2}
        self.plain.owner = self  # a cycle
        self.ring = []
        self.ring.append(self.ring)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.plain.n += 1
            self.plain.deep["a"][0] += 1
            self.nested[0]["a"] += 1
            self.ordered["c"] = 3
            self.names.discard(1)
            self.names.add(7)
            self.ring.append(1)
        return x + 1


def everything(model):
    plain = model.plain
    return repr(
        [
            plain.n,
            plain.deep,
            model.nested,
            model.ordered,
            model.names,
            len(model.ring),
            vars(model).keys(),
        ]
    )


def test_what_the_model_holds_is_as_before():
    model = Everywhere().eval()
    before, ids = everything(model), [id(model.nested), id(model.ordered)]
    with torch.no_grad():
        build(model, rows(), shapes="bucket", sizes=[8, 64], backend="eager")
    assert everything(model) == before
    assert ids == [id(model.nested), id(model.ordered)]


def counting():
    n = 0

    def count(x):
        nonlocal n
        n += 1
        return x + n

    return count


WRITES = {
    "global TABLE": lambda x: (TABLE.update(n=TABLE["n"] + 1), x)[1],
    "global MEMORY": lambda x: x + MEMORY.add_(1),
    "closure's n": counting(),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_forward_that_writes_to_globals_and_closures_is_refused(name):
    class Writes(nn.Module):
        def forward(self, x):
            return fn(x) + 1

    fn = WRITES[name]
    with (
        torch.no_grad(),
        pytest.raises(ServeError, match=f"forward writes to {name}, and building"),
    ):
        build(Writes().eval(), rows(), backend="eager")


def test_a_forward_that_writes_a_weight_is_refused():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(16), requires_grad=False)

        def forward(self, x):
            self.weight.add_(1)
            return x + self.weight

    with torch.no_grad(), pytest.raises(ServeError, match="forward writes to weight, "):
        build(Writes().eval(), rows(), backend="eager")
