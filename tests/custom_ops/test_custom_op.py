"""Operators of one's own: definition, fakes given and inferred, compiles with any batch size."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

import torchloom
from torchloom.custom_ops import custom_op, propose_fake
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
    with pytest.raises(Exception, match=r"custom::bare.*has no fake.*@bare\.register_fake"):
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
        with pytest.raises(OpError, match="'guess'"):
            custom_op("custom::fakes2", fn, fake="guess")


class TestInference:
    """Fakes fitted to what an operator does."""

    @pytest.mark.parametrize(
        ("name", "fn", "args", "last"),
        [
            ("same", lambda x: x * 2, (FIRST,), None),
            (
                "rows",
                lambda x, n: x.new_zeros(x.shape[0] + n, x.shape[1]),
                (FIRST, 3),
                "x.shape[0] + n, x.shape[1]",
            ),
            ("product", lambda x: x.reshape(-1), (FIRST,), "x.shape[0] * x.shape[1],"),
            ("matrix", lambda x, w: x @ w, (FIRST, torch.randn(6, 3)), "x.shape[0], w.shape[1]"),
            (
                "half",
                lambda x: x[:, ::2].contiguous(),
                (FIRST,),
                "x.shape[0], (x.shape[1] + 1) // 2",
            ),
            ("window", lambda x: x.unfold(1, 3, 1).contiguous(), (FIRST,), None),
            ("double", lambda x: x.double(), (FIRST,), "dtype=torch.float64"),
        ],
    )
    def test_formulas(self, name, fn, args, last) -> None:
        names = "x, n" if name == "rows" else "x, w" if name == "matrix" else "x"
        kinds = {"x": "Tensor x", "x, n": "Tensor x, int n", "x, w": "Tensor x, Tensor w"}
        op = custom_op(
            f"infer::{name}", lambda *a: fn(*a).clone(), schema=f"({kinds[names]}) -> Tensor"
        )
        proposal = propose_fake(op, [args])
        print(proposal.source)
        if last is not None:
            assert last in proposal.source
        op.register_fake(proposal)
        torchloom.check_op(op, [args], count=40, compiled=False, gradients=False)

    def test_arguments_by_keyword_and_defaults_vary_too(self) -> None:
        @custom_op("loomtests::tile", fake=lambda x, *, n=2: x.repeat(n, 1))
        def tile(x: Tensor, *, n: int = 2) -> Tensor:
            return x.repeat(n, 1)

        @custom_op("loomtests::grown")
        def grown(x: Tensor, by: int = 1, *, twice: bool = False) -> Tensor:
            return x.new_zeros(x.shape[0] + by)

        x = torch.ones(3, 4)
        assert torch.compile(lambda x: tile(x, n=3), fullgraph=True, backend="eager")(x).shape == (
            9,
            4,
        )
        for samples in ([(x,)], [{"x": x, "n": 3}]):
            found = propose_fake(tile, samples)
            assert "fake_tile(x, *, n=2):" in found.source and found.fake(x, n=5).shape == (15, 4)
        found = propose_fake(grown, [(torch.ones(5),)])
        assert "(x, by=1, *, twice=False):" in found.source and "x.shape[0] + by" in found.source
        with pytest.raises(OpError, match="other arguments than the operator"):
            tile.register_fake(lambda x, m: x)

    def test_several_results(self) -> None:
        @custom_op("infer::split", mutates_args=())
        def split(x: Tensor, n: int) -> list[Tensor]:
            return [x[:n].clone(), x[n:].clone()]

        with pytest.raises(OpError, match="no formula fits"):
            propose_fake(split, [(FIRST, 9)])  # slices end at the edge

    def test_as_a_decorator_it_says_what_it_made(self, caplog) -> None:
        with caplog.at_level(logging.WARNING, "torchloom"):

            @custom_op("infer::decorated", fake="infer", samples=[(FIRST,)])
            def decorated(x: Tensor) -> Tensor:
                return x.t().contiguous()

        assert "x.new_empty((x.shape[1], x.shape[0]))" in caplog.text
        compiled = torch.compile(decorated, backend="aot_eager", fullgraph=True, dynamic=True)
        assert torch.equal(compiled(FIRST), FIRST.t())

    def test_nothing_is_guessed(self) -> None:
        @custom_op("infer::nonzero", mutates_args=())
        def nonzero(x: Tensor) -> Tensor:
            return x.nonzero()

        with pytest.raises(OpError, match="sizes of its results depend on values"):
            propose_fake(nonzero, [(FIRST,)])
        with pytest.raises(OpError, match="without samples"):
            propose_fake(nonzero, [])
