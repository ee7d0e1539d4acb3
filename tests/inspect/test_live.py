"""Live entries, and what a call would do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchloom
from torchloom.compiler import CompiledModuleWrapper
from torchloom.errors import InspectError


class A(nn.Module):
    def forward(self, x):
        return torch.exp(2 * x)


def test_what_calls_would_do() -> None:
    def fn(inputs):
        return inputs["x"] * inputs["y"]

    def given(size=10, dtype=torch.float32, grad=True):
        shape = size if isinstance(size, tuple) else (size,)
        return {k: torch.ones(shape, dtype=dtype, requires_grad=grad) for k in "xy"}

    compiled = torch.compile(fn, backend="eager")
    assert torchloom.explain_call(compiled, given()).action == "compile"
    compiled(given())
    hit = torchloom.explain_call(compiled, given())
    assert (hit.action, hit.hit, hit.misses) == ("hit", "0/0", ())
    miss = torchloom.explain_call(compiled, given(8))
    assert miss.action == "recompile"
    assert "argument inputs['x']" in miss.misses[0].english
    assert "expected size(0) == 10, got 8" in miss.misses[0].english
    compiled(given(8))
    assert torchloom.explain_call(compiled, given(8)).hit == "0/1"
    assert len(torchloom.explain_call(compiled, given(10)).hits) == 2
    double = torchloom.explain_call(compiled, given(dtype=torch.float64))
    assert all("dtype" in miss.text for miss in double.misses)
    grad = torchloom.explain_call(compiled, given((3, 3), grad=False))
    assert len(grad.misses) == 2
    assert all("requires_grad" in miss.text for miss in grad.misses)
    assert len(torchloom.entries(compiled)) == 2  # asking compiled nothing


def test_defaults_and_closures_are_bound() -> None:
    scale = torch.full((2,), 3.0)

    def fn(x, power=2, *, shift=1.0):
        return x**power * scale + shift

    compiled = torch.compile(fn, backend="eager")
    compiled(torch.ones(2))
    assert torchloom.explain_call(compiled, torch.ones(2)).action == "hit"
    assert torchloom.explain_call(compiled, torch.ones(2), power=3).action == "recompile"
    with pytest.raises(InspectError, match="cannot be called so"):
        torchloom.explain_call(compiled)


def test_modules_methods_and_wrappers() -> None:
    x = torch.ones(2, 4)
    plain = nn.Linear(4, 4)
    compiled = torch.compile(plain, backend="eager")
    compiled(x)
    assert len(torchloom.entries(compiled)) == 1
    assert torchloom.explain_call(compiled, x).action == "hit"
    torch._dynamo.reset()
    in_place = A()
    in_place.compile(backend="eager")
    in_place(x)
    assert len(torchloom.entries(in_place)) == 1
    assert torchloom.explain_call(in_place, x).action == "hit"
    assert len(torchloom.entries(torch.compile(in_place.forward, backend="eager"))) == 1
    wrapped = CompiledModuleWrapper(nn.Linear(4, 4))
    wrapped.set_backend("eager")
    assert torchloom.entries(wrapped) == []
    wrapped(x)
    assert len(torchloom.entries(wrapped)) == 1
    assert torchloom.explain_call(wrapped, x).action == "hit"
    assert torchloom.explain_call(wrapped, x.double()).action == "recompile"


@pytest.mark.parametrize("value", [3, "text", len, int])
def test_what_has_no_python_function(value) -> None:
    with pytest.raises(InspectError, match="not a Python function"):
        torchloom.entries(value)


def test_overhead_is_measured_in_parts() -> None:
    def fn(x):
        return x.sin() + 1

    compiled, x = torch.compile(fn, backend="eager"), torch.ones(4)
    with pytest.raises(InspectError, match="no entry"):
        torchloom.overhead(compiled, x)
    compiled(x)
    found = torchloom.overhead(compiled, x)
    assert 0 < found.guard_us < found.compiled_us
    assert found.eager_us > 0
    assert found.num_guards == len(torchloom.entries(compiled)[0].guard)
    assert "us" in str(found)
    with pytest.raises(InspectError, match="not compiled"):
        torchloom.overhead(fn, x)
    assert len(torchloom.entries(compiled)) == 1
