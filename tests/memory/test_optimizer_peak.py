"""What an optimizer's step allocates, against the allocator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from support.optimizers import Lamb, Shampoo
from torchloom.memory import (
    distinct_bytes,
    measure_peak,
    step_memory,
)

OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "loop": lambda params: torch.optim.AdamW(params, foreach=False),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params),
    "groups": lambda params: torch.optim.AdamW(
        [{"params": params[:1], "lr": 0.1}, {"params": params[1:]}], foreach=False
    ),
}


OF_MATRICES = {
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "LAMB": lambda params: Lamb(params),
    "Shampoo": lambda params: Shampoo(params),
}


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    shapes = ((513, 37), (2049,), (71, 3, 29), (1,))
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_the_allocator_has_it(name: str) -> None:
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    before = [param.detach().clone() for param in params]
    num_states = len(optimizer.state)  # some make them before their first step
    fresh = step_memory(optimizer).peak_bytes
    assert all(map(torch.equal, params, before))
    assert len(optimizer.state) == num_states
    optimizer.step()
    predicted = step_memory(optimizer).peak_bytes
    assert fresh == pytest.approx(predicted, abs=64)
    measured = measure_peak(optimizer.step).peak_bytes
    # Numbers become tensors of 4 to 8 bytes on the way, a few at a time.
    assert predicted == pytest.approx(measured, abs=64)


@pytest.mark.parametrize("name", [*OF_MATRICES])
def test_what_optimizers_of_matrices_allocate_and_keep(name: str) -> None:
    """Their states have other sizes than the parameters, and some read numbers, which are made up."""
    optimizer = OF_MATRICES[name](parameters()[:2])
    fresh = step_memory(optimizer)
    optimizer.step()
    kept = {id(param): distinct_bytes(optimizer.state[param].values()) for param in optimizer.state}
    assert fresh.state_bytes == kept
    assert fresh.peak_bytes == pytest.approx(measure_peak(optimizer.step).peak_bytes, abs=64)


def test_sizes_that_depend_on_values_are_not_known() -> None:
    class Selects(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data -= param.grad[param.grad > 0].sum()

    assert step_memory(Selects(parameters())) is None


def test_a_wrapper_of_a_framework_is_left_as_it_is() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    groups = optimizer.param_groups
    wrapper = SimpleNamespace(param_groups=groups, state=optimizer.state, step=optimizer.step)
    assert step_memory(wrapper) is None
    assert wrapper.param_groups is groups
