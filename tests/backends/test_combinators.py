"""Backends made of backends."""

from __future__ import annotations

import logging

import pytest
import torch

from torchloom import events
from torchloom.backends import (
    by_device,
    check_against_eager,
    fallback,
    lookup_backend,
    register_backend,
    tee,
    temporary_backend,
)
from torchloom.errors import BackendError, BackendMismatchError


def fn(x, y):
    z = torch.sin(x) * y
    return torch.exp(z) + 1, z


def inputs():
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(4, 3, generator=generator, requires_grad=True),
        torch.randn(4, 3, generator=generator, requires_grad=True),
    )


def failing(gm, example_inputs, **options):
    for node in list(gm.graph.nodes):
        if node.op == "call_function":
            node.target = torch.neg  # a failing compiler may leave a wreck behind
    raise RuntimeError("cannot do this")


def test_tee_shows_the_captured_graph() -> None:
    graphs = []

    def rewriting(gm, example_inputs):
        for node in gm.graph.nodes:
            if node.op == "call_function":
                node.target = torch.add
        return lambda *args: (args[0], args[0])

    torch.compile(fn, backend=tee(rewriting, lambda gm, _: graphs.append(gm)))(*inputs())
    names = [n.target for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert torch.sin in names
    assert torch.exp in names
    actual = graphs[0](*inputs())
    assert torch.equal(actual[0], fn(*inputs())[0])


def test_tee_keeps_the_results_and_refuses_bad_sinks() -> None:
    seen = []
    compiled = torch.compile(fn, backend=tee("aot_eager", lambda gm, inputs: seen.append(inputs)))
    for left, right in zip(compiled(*inputs()), fn(*inputs()), strict=True):
        assert torch.equal(left, right)
    assert len(seen) == 1
    with pytest.raises(BackendError, match="sink"):
        tee("eager", [])
    with pytest.raises(BackendError, match="eeger"):
        tee("eeger", print)


def test_fallback_gives_the_next_backend_the_untouched_graph(caplog) -> None:
    with events.Recorder() as recorder, caplog.at_level(logging.WARNING, logger="torchloom"):
        out = torch.compile(fn, backend=fallback(failing, "aot_eager"))(*inputs())
    assert torch.equal(out[0], fn(*inputs())[0])
    assert "compiled with aot_eager, because failing failed: RuntimeError: cannot do this" in (
        caplog.text
    )
    (chosen,) = [e for e in recorder.events if isinstance(e, events.BackendChosen)]
    assert chosen.backend == "aot_eager"
    assert chosen.failed == (("failing", "RuntimeError: cannot do this"),)


def test_fallback_with_nothing_left_names_every_cause() -> None:
    chain = fallback("not_installed", failing)
    with pytest.raises(Exception, match="every backend of fallback") as caught:
        torch.compile(fn, backend=chain)(*inputs())
    assert "not_installed" in str(caught.value)
    assert "failing: RuntimeError: cannot do this" in str(caught.value)


def test_by_device() -> None:
    chosen = []

    def on(name):
        def backend(gm, example_inputs):
            chosen.append(name)
            return gm.forward

        return backend

    backend = by_device(cpu=on("cpu"), cuda=on("cuda"))
    torch.compile(fn, backend=backend)(*inputs())
    torch.compile(lambda: torch.ones(2) + 1, backend=backend)()
    assert chosen == ["cpu", "cpu"]
    with pytest.raises(Exception, match="runs on cpu, for which no backend was given"):
        torch.compile(lambda x: x + 1, backend=by_device(cuda="eager"))(torch.ones(2))
    with pytest.raises(Exception, match="runs on meta, for which"):
        torch.compile(lambda x: x + 2, backend=backend)(torch.ones(2, device="meta"))
    other = by_device(cuda="eager", default=on("default"))
    torch.compile(lambda x: x + 3, backend=other)(torch.ones(2))
    assert chosen[-1] == "default"
    with pytest.raises(BackendError, match="no backend"):
        by_device()


def wrong(op, factor):
    """A backend that computes one operator wrongly."""

    def backend(gm, example_inputs):
        for node in list(gm.graph.nodes):
            if node.target is op:
                with gm.graph.inserting_after(node):
                    scaled = gm.graph.call_function(torch.mul, (node, factor))
                node.replace_all_uses_with(scaled)
                scaled.args = (node, factor)
        gm.recompile()
        return gm.forward

    return backend


def test_check_names_the_first_node_that_differs() -> None:
    checked = check_against_eager(wrong(torch.sin, 1.1))
    with pytest.raises(BackendMismatchError) as caught:
        torch.compile(fn, backend=checked)(*inputs())
    text = str(caught.value)
    assert "node 'sin' = torch.sin(l_x_)" in text
    assert "test_combinators.py:" in text
    assert "eager has" in text


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def test_check_compares_gradients() -> None:
    def backend(gm, example_inputs):
        return lambda *args: gm.forward(WrongGradient.apply(args[0]), *args[1:])

    with pytest.raises(BackendMismatchError, match="gradient of input 'l_x_'"):
        torch.compile(fn, backend=check_against_eager(backend))(*inputs())
    torch._dynamo.reset()
    torch.compile(fn, backend=check_against_eager(backend, grads=False))(*inputs())


def test_check_compares_what_is_changed_in_place() -> None:
    def in_place(x):
        x.mul_(2)
        return x.sum()

    def forgets(gm, example_inputs):
        return lambda x: gm.forward(x.clone())

    with pytest.raises(BackendMismatchError, match="changed in place"):
        torch.compile(in_place, backend=check_against_eager(forgets))(torch.ones(3))
    x = torch.ones(3)
    torch._dynamo.reset()
    torch.compile(in_place, backend=check_against_eager("aot_eager"))(x)
    assert x.tolist() == [2, 2, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_check_takes_nan_for_equal_on_both_sides_only(value) -> None:
    def odd(x):
        return x * value

    torch.compile(odd, backend=check_against_eager("aot_eager"))(torch.ones(3))
    with pytest.raises(BackendMismatchError, match="3 of 3 elements differ"):
        torch._dynamo.reset()
        torch.compile(odd, backend=check_against_eager(lambda gm, _: lambda x: (x,)))(torch.ones(3))


def test_combinators_can_be_registered_and_nest() -> None:
    graphs = []
    nested = tee(fallback(failing, by_device(cpu="aot_eager")), lambda gm, _: graphs.append(gm))
    register_backend(nested, name="nested")
    out = torch.compile(fn, backend="nested")(*inputs())
    assert torch.equal(out[0], fn(*inputs())[0])
    assert len(graphs) == 1
    assert lookup_backend("nested") is nested
    from torchloom.backends import unregister_backend

    unregister_backend("nested")


def test_reset_and_config_reach_the_inner_backends() -> None:
    class Stateful:
        resets = 0

        def __call__(self, gm, example_inputs):
            return gm.forward

        def reset(self):
            self.resets += 1

        def get_compiler_config(self):
            return {"depth": 3}

    inner = Stateful()
    chain = tee(fallback(inner, "eager"), lambda gm, _: None)
    compiled = torch.compile(fn, backend=chain)
    compiled(*inputs())
    torch._dynamo.reset()
    assert inner.resets >= 1
    assert chain.get_compiler_config() == {"depth": 3}
    assert "max_autotune" in tee("inductor", print).get_compiler_config()
    with temporary_backend(inner, name="stateful"):
        assert lookup_backend("stateful") is inner
