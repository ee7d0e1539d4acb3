"""What torch's backends promise holds for backends that are found through this registry."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx._lazy_graph_module import _force_skip_lazy_graph_module

from support.gpu import gpu
from torchloom.backends import lookup_backend, register_backend

CLOSE = {"rtol": 1e-2, "atol": 1e-2}


class Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10), nn.Sigmoid())

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    "name",
    [
        "eager",
        "eager_noexcept",
        "ts",
        "aot_eager",
        "aot_eager_decomp_partition",
        "aot_ts",
        "torchloom",
    ],
)
@pytest.mark.filterwarnings("ignore:The TorchScript type system")  # of "ts" itself
def test_built_ins_equal_eager(name: str) -> None:  # B3
    torch.manual_seed(0)
    model, x = Seq(), torch.randn(7, 10)
    expected = model(x)
    for backend in (name, lookup_backend(name)):
        torch._dynamo.reset()
        # TorchScript cannot read the lazy graph modules that Dynamo makes since torch 2.3.
        with _force_skip_lazy_graph_module():
            actual = torch.compile(model, backend=backend)(x)
        torch.testing.assert_close(actual, expected, **CLOSE)
    actual.sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected.sum().backward()
    for left, right in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(left, right.grad, **CLOSE)


@gpu
def test_cudagraphs() -> None:  # B4; without a GPU describe_backends says why not
    model, x = Seq().cuda(), torch.randn(7, 10, device="cuda")
    compiled = torch.compile(model, backend=lookup_backend("cudagraphs"))
    torch.testing.assert_close(compiled(x), model(x), **CLOSE)


def test_an_aot_backend_can_be_registered() -> None:  # B9
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def compiler(gm, example_inputs):
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    register_backend(aot_autograd(fw_compiler=compiler), name="own_aot")
    model, x = Seq(), torch.randn(7, 10)
    out = torch.compile(model, backend="own_aot")(x)
    out.sum().backward()
    torch.testing.assert_close(out, model(x))
    assert len(graphs) == 2  # forward and backward
