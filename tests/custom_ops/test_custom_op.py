"""Operators of one's own: definition, fakes, compiles with any batch size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchloom
from torchloom.custom_ops import custom_op
from torchloom.errors import OpError

FIRST = torch.arange(24.0).reshape(4, 6)


def compiles(fn, *sizes):
    """Return how many graphs a function compiles to over batch sizes, and compare with eager."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    for size in sizes:
        x = torch.randn(size, 6)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        torch.testing.assert_close(compiled(x), fn(x), rtol=0, atol=0)
    return len(graphs)


def test_a_branch_on_the_batch_hides_in_an_operator() -> None:
    @torchloom.custom_op("custom::scaled", fake=torch.empty_like)
    def scaled(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] >= 4 else x * 100

    assert compiles(lambda x: scaled(x) + 1, 8, 3, 2, 16, 5) == 1


def test_what_returns_nothing_needs_no_fake() -> None:
    seen = []

    @custom_op("custom::notes")
    def notes(x: Tensor) -> None:
        seen.append(x.shape[0])

    @custom_op("custom::fills", mutates_args=("x",))
    def fills(x: Tensor, by: float) -> None:
        x.fill_(by)

    def fn(x):
        y = x * 1
        fills(y, 3.0)
        notes(y)
        return y

    assert not notes.needs_fake
    assert not fills.needs_fake
    torch.testing.assert_close(
        torch.compile(fn, backend="aot_eager", fullgraph=True)(FIRST), torch.full((4, 6), 3.0)
    )
    assert seen == [4]


def test_a_missing_fake_is_one_clear_error() -> None:
    @custom_op("custom::bare")
    def bare(x: Tensor) -> Tensor:
        return x * 2

    assert bare.needs_fake
    assert torch.equal(bare(FIRST), FIRST * 2)
    with pytest.raises(
        Exception,
        match=r"bare.*has no fake.*@bare\.register_fake.*lambda x: torch\.empty_like\(x\)",
    ):
        torch.compile(bare, backend="eager", fullgraph=True)(FIRST)
    bare.register_fake(torch.empty_like)
    assert torch.equal(torch.compile(bare, backend="eager", fullgraph=True)(FIRST), FIRST * 2)


def test_autograd_and_vmap() -> None:
    @custom_op("custom::cubed", fake=torch.empty_like)
    def cubed(x: Tensor) -> Tensor:
        return x**3

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    cubed.register_autograd(
        lambda ctx, grad: 3 * grad * ctx.saved_tensors[0] ** 2, setup_context=setup
    )
    cubed.register_vmap(lambda info, in_dims, x: (cubed(x), in_dims[0]))
    x = FIRST.clone().requires_grad_()
    cubed(x).sum().backward()
    assert torch.equal(x.grad, 3 * FIRST**2)
    assert torch.equal(torch.vmap(cubed)(FIRST), FIRST**3)


class TestErrors:
    def test_names(self) -> None:
        for name in ("scaled", "a::b::c", "::x", "a::"):
            with pytest.raises(OpError, match="no operator's name"):
                custom_op(name, lambda x: x)
        with pytest.raises(OpError, match="'aten' is taken"):
            custom_op("aten::mine", lambda x: x)

    def test_schemas(self) -> None:
        def unknown(x: Tensor, shape: tuple) -> Tensor:
            return x

        with pytest.raises(OpError, match="custom::unknown cannot become an operator"):
            custom_op("custom::unknown", unknown)

        def known(x: Tensor) -> None: ...

        with pytest.raises(OpError, match="names 'y', its arguments are x"):
            custom_op("custom::known", known, mutates_args=("y",))

    def test_fakes(self) -> None:
        def fn(x: Tensor, by: float) -> Tensor:
            return x * by

        with pytest.raises(OpError, match="takes other arguments"):
            custom_op("custom::fakes", fn, fake=lambda x: x)
        with pytest.raises(OpError, match="a function of its arguments, not 'infer'"):
            custom_op("custom::fakes2", fn, fake="infer")


def test_arguments_by_keyword() -> None:
    @custom_op("loomtests::tile", fake=lambda x, *, n=2: x.repeat(n, 1))
    def tile(x: Tensor, *, n: int = 2) -> Tensor:
        return x.repeat(n, 1)

    compiled = torch.compile(lambda x: tile(x, n=3), fullgraph=True, backend="eager")
    assert compiled(torch.ones(3, 4)).shape == (9, 4)
    torchloom.check_op(tile, [{"x": torch.ones(3, 4), "n": 3}], count=40, compiled=False)
    with pytest.raises(OpError, match="other arguments than the operator"):
        tile.register_fake(lambda x, m: x)
