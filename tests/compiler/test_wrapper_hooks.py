"""Hooks of a wrapper run as they do with torch.compile(module), whenever they were registered."""

from __future__ import annotations

import pytest
import torch

from compiler.test_wrapper import Counting, Model
from compiler.test_wrapper import wrap as wrap_both

X = torch.ones(2, 4)


def wrap(backend="eager"):
    return wrap_both(backend=backend)[0]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("make", [wrap, lambda: torch.compile(Model(), backend="eager")])
def test_hooks_that_come_and_go_after_the_first_call(make) -> None:
    model, calls = make(), []
    model(X)
    before = model.register_forward_pre_hook(lambda module, args: calls.append("before"))
    after = model.register_forward_hook(lambda module, args, output: output * 0 + 7)
    assert model(X).eq(7).all()
    assert calls == ["before"]
    after.remove()
    assert not model(X).eq(7).any()
    assert calls == ["before"] * 2
    before.remove()
    model(X)
    assert calls == ["before"] * 2


def test_hooks_with_keywords_and_those_that_always_run() -> None:
    model, calls = wrap(), []
    model(X)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {"shift": 3.0}), with_kwargs=True
    )
    model.register_forward_hook(lambda *_: calls.append("always"), always_call=True)
    assert torch.equal(model(X), Model.forward(model, X, shift=3.0))
    with pytest.raises(Exception):  # noqa: B017  the shapes do not fit
        model(torch.ones(2, 5))
    assert calls == ["always"] * 2


def test_backward_hooks_after_the_first_call() -> None:
    model, seen = wrap("aot_eager"), []
    model(X).sum().backward()
    model.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("full"))
    model.register_full_backward_pre_hook(lambda module, grad_out: seen.append("pre"))
    model(X.clone().requires_grad_()).sum().backward()
    assert seen == ["pre", "full"]


def test_forward_by_itself_is_not_compiled() -> None:
    counting = Counting()
    model = wrap(counting)
    assert torch.equal(model.forward(X), Model.forward(model, X))
    assert counting.compiles == 0
    model(X)
    assert model.forward.__func__ is Model.forward
    assert type(model).forward is Model.forward
    assert counting.compiles == 1


def test_a_forward_that_is_replaced() -> None:
    model = wrap()
    model.forward = lambda x: x + 1
    assert torch.equal(model(X), X + 1)
    del model.forward
    assert model.forward.__func__ is Model.forward
    with pytest.raises(AttributeError):
        del model.forward


def test_the_compiler_function_is_told() -> None:
    model = wrap()
    assert model.compiler_fn is None

    def compile_it(module):
        return torch.compile(module, backend="eager")

    model.set_compiler_fn(compile_it)
    assert model.compiler_fn is compile_it
    model(X)
    assert model.compiler_fn is compile_it
