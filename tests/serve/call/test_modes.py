"""Calls under modes of torch that change what operators do: refused, or run by the model itself."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from serve.models import Plain, made, rows
from torchloom.errors import ContractError
from torchloom.serve import build

X = torch.ones(3, 16)


class TenTimes(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 10 if getattr(func, "__name__", "") == "relu" else found


class Counts(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def programs():
    torch.manual_seed(0)
    model = made(Plain)
    with torch.no_grad():
        return model, build(model, rows()), build(model, rows(), out_of_range="eager")


@pytest.mark.parametrize("make", [TenTimes, Counts, lambda: FlopCounterMode(display=False)])
def test_modes_that_kernels_would_not_see(programs, make):
    model, strict, eager = programs
    with torch.no_grad():
        with make() as mode:
            wanted = model(X)
            num = getattr(mode, "num", 0)
            with pytest.raises(ContractError, match=f"under {type(mode).__name__}|_global_forward"):
                strict(X)
            found = eager(X)
        torch.testing.assert_close(found, wanted)
        assert getattr(mode, "num", 0) >= 2 * num
        torch.testing.assert_close(strict(X), model(X))


def test_forward_derivatives_are_not_dropped(programs):
    model, strict, eager = programs
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(ContractError, match="no forward derivatives"):
            strict(dual)
        wanted, found = (forward_ad.unpack_dual(call(dual)).tangent for call in (model, eager))
        torch.testing.assert_close(found, wanted)


def test_a_default_device_is_none_of_them_as_long_as_it_is_the_same(programs):
    model, strict, _ = programs
    with torch.no_grad():
        for _ in range(2):
            with torch.device("cpu"):
                torch.testing.assert_close(strict(X), model(X))
                torch.testing.assert_close(strict(X), model(X))
            torch.testing.assert_close(strict(X), model(X))
        with torch.device("meta"), pytest.raises(ContractError, match="default device is meta"):
            strict(X)
        with torch.device("cpu"):
            made_under = build(model, rows(), backend="eager")
            torch.testing.assert_close(made_under(X), model(X))
        torch.testing.assert_close(made_under(X), model(X))
