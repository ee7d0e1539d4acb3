"""What an optimizer's step allocates, against the allocator."""

from __future__ import annotations

import pytest
import torch

from torchloom.memory import measure_peak, optimizer_peak

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
    fresh = optimizer_peak(optimizer)
    assert all(map(torch.equal, params, before))
    assert len(optimizer.state) == num_states
    optimizer.step()
    predicted = optimizer_peak(optimizer)
    assert fresh == pytest.approx(predicted, abs=64)
    measured = measure_peak(optimizer.step).peak_bytes
    # Numbers become tensors of 4 to 8 bytes on the way, a few at a time.
    assert predicted == pytest.approx(measured, abs=64)


def test_a_step_that_reads_values_is_left_out() -> None:
    assert optimizer_peak(torch.optim.Adafactor(parameters())) is None
