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


def fn(x, y):
    return (x + y).sin() @ y.T


def test_example_inputs_can_be_run_and_have_the_shape_of_the_result() -> None:  # B1
    seen = []

    @register_backend(name="running_examples")
    def backend(gm, example_inputs):
        seen.append(gm(*example_inputs))
        return gm.forward

    x, y = torch.randn(3, 5), torch.randn(3, 5)
    real = torch.compile(fn, backend="running_examples")(x, y)
    (example,) = seen[0]
    assert (example.shape, example.stride(), example.dtype) == (
        real.shape,
        real.stride(),
        real.dtype,
    )


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


def test_explain_with_a_backend_counts_graphs_and_breaks() -> None:  # B7
    from torch._dynamo.backends.debugging import ExplainWithBackend

    def nested(x):
        x = torch.sigmoid(x)
        x = torch.tan(x)
        torch._dynamo.graph_break()
        x = torch.cos(x)
        return torch.sin(x)

    counting = ExplainWithBackend("inductor")
    x = torch.randn(3)
    compiled = torch.compile(nested, backend=counting)
    torch.testing.assert_close(compiled(x), nested(x))
    output = counting.output()
    assert (output.graph_count, output.graph_break_count, output.op_count) == (2, 1, 4)
    for heading in ("Graph Count", "Graph Break Count", "Op Count", "Break Reasons"):
        assert heading in str(output)


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


def test_other_options_compile_again() -> None:  # B12
    def small(x):
        return (x * 3).relu()

    x = torch.randn(4)
    torch.compile(small, options={"_raise_error_for_testing": False})(x)
    with pytest.raises(Exception, match="backend='inductor' raised"):
        torch.compile(small, options={"_raise_error_for_testing": True})(x)


def test_the_tracing_context_reaches_a_registered_backend() -> None:  # B13
    from torch._dynamo.backends.common import aot_autograd
    from torch._guards import TracingContext

    seen = []

    def inference(gm, example_inputs):
        context = TracingContext.get()
        seen.append((context.fw_metadata is not None, len(context.params_flat)))
        return gm.forward

    register_backend(
        lambda gm, inputs: aot_autograd(
            fw_compiler=inference, inference_compiler=inference, keep_inference_input_mutations=True
        )(gm, inputs),
        name="tracing",
    )
    model = nn.Linear(4, 4)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        torch.compile(model, backend="tracing")(torch.randn(2, 4))
    assert seen
    assert seen[0][0]
    assert seen[0][1] in (0, 2)  # parameters are graph inputs unless the backend freezes them
