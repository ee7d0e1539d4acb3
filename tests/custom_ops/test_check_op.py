"""Mistakes in operators that one good sample does not show, and operators without any."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchloom.custom_ops import check_op, custom_op
from torchloom.errors import OpCheckError

X = torch.rand(4, 8) + 0.5
"""Positive, contiguous, float32: what a test of one's own would use."""


def kinds(op, *samples, **options):
    """Return what is found, and show the whole report where a test fails."""
    report = check_op(op, samples, count=60, strict=False, **options)
    print(report)
    return {finding.kind for finding in report.findings}


def test_a_right_operator_passes() -> None:
    @custom_op("check::right", fake=lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
    def right(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    report = check_op(right, [(torch.randn(4, 8), torch.randn(8, 3))])
    assert report.ok
    assert report.num_inputs > 50


def test_arguments_of_equal_sizes_do_not_broadcast() -> None:
    @custom_op("check::product", fake=lambda x, y: x.new_empty(x.shape))
    def product(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).contiguous().clone()

    report = check_op(product, [(X, X + 1)], compiled=False)
    assert report.ok
    assert report.num_inputs > 50


def test_a_size_of_the_example_in_the_fake() -> None:
    @custom_op("check::hard_coded", fake=lambda x: x.new_empty(4, 8))
    def hard_coded(x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    torch.library.opcheck(hard_coded.defined, (X,))  # passes
    report = check_op(hard_coded, [(X,)], count=60, strict=False)
    (shape,) = (each for each in report.findings if each.kind == "fake shape 0")
    assert "its fake says (4, 8)" in shape.says
    assert shape.sample.startswith("(float32[")


def test_results_that_alias_some_inputs() -> None:
    @custom_op("check::alias", fake=lambda x: x.new_empty(x.shape))
    def alias(x: Tensor) -> Tensor:
        return x.contiguous()

    torch.library.opcheck(alias.defined, (X.t(),))
    assert "alias" in kinds(alias, (X.t(),), compiled=False)


def test_writes_that_change_nothing_here() -> None:
    @custom_op("check::writes", fake=torch.empty_like)
    def writes(x: Tensor) -> Tensor:
        x.clamp_(min=0)
        return x * 2

    torch.library.opcheck(writes.defined, (X,))
    report = check_op(writes, [(X,)], count=60, strict=False, compiled=False)
    (write,) = (each for each in report.findings if each.kind == "write x")
    assert "mutates_args=('x',)" in write.fix


def test_writes_through_numpy_are_seen_in_the_bytes() -> None:
    @custom_op("check::numpy_writes", fake=torch.empty_like)
    def numpy_writes(x: Tensor) -> Tensor:
        array = x.numpy()
        array[array < 0] = 0
        return x * 2

    assert "write x" in kinds(numpy_writes, (X,), compiled=False)


def test_a_missed_upcast() -> None:
    @custom_op("check::upcast", fake=torch.empty_like)
    def upcast(x: Tensor) -> Tensor:
        return x.float() * 2 if x.dtype == torch.float16 else x * 2

    torch.library.opcheck(upcast.defined, (X,))
    assert "fake dtype 0" in kinds(upcast, (X,))


def test_a_fake_that_branches_on_a_size() -> None:
    def fake(x):
        return x.new_empty(x.shape) if x.shape[0] > 4 else torch.empty_like(x)

    @custom_op("check::branches", fake=fake)
    def branches(x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    report = check_op(branches, [(X,)], count=60, strict=False)
    (branch,) = (each for each in report.findings if each.kind == "branch")
    assert any(text in branch.says for text in ("> 4", "4 <", ">= 5", "<= 4"))
    assert "test_check_op.py" in branch.says


def test_a_wrong_backward() -> None:
    @custom_op("check::backward", fake=torch.empty_like)
    def square(x: Tensor) -> Tensor:
        return x * x

    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]  # lacks the factor two

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    square.register_autograd(backward, setup_context=setup)
    assert kinds(square, (X,)) == {"gradient"}
    right = lambda ctx, grad: 2 * grad * ctx.saved_tensors[0]  # noqa: E731
    square.register_autograd(right, setup_context=setup)
    assert kinds(square, (X,)) == set()


def test_what_torchs_own_check_finds_is_worded() -> None:
    calls = []

    @custom_op("check::counts", fake=torch.empty_like)
    def counts(x: Tensor) -> Tensor:
        calls.append(x)
        return x + len(calls)

    report = check_op(counts, [(X,)], count=20, strict=False)
    (found,) = report.findings
    assert found.kind == "compiled" and "other values compiled than eager" in found.says
    assert "\n" not in found.says
    assert check_op(counts, [(X,)], count=20, compiled=False).ok


def test_a_fake_that_refuses_what_the_operator_takes() -> None:
    def fake(x):
        assert x.shape[0] % 2 == 0, "even batches only"
        return torch.empty_like(x)

    @custom_op("check::refuses", fake=fake)
    def refuses(x: Tensor) -> Tensor:
        return x * 2

    assert "fake raises" in kinds(refuses, (X,))


def test_what_the_operator_refuses_is_no_input() -> None:
    @custom_op("check::even", fake=torch.empty_like)
    def even(x: Tensor) -> Tensor:
        if x.shape[0] % 2:
            raise ValueError("even batches only")
        return x * 2

    report = check_op(even, [(X,)], count=60, strict=False)
    assert report.ok, str(report)
    assert report.num_refused > 0
    with pytest.raises(OpCheckError, match=r"refuses the example .*float32\[3, 8\].*even batches"):
        check_op(even, [(X[:3],)])


def test_errors_name_sample_and_difference() -> None:
    @custom_op("check::raised", fake=lambda x: x.new_empty(4, 8))
    def raised(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(
        OpCheckError, match=r"check::raised has shape \(\d, \d\), its fake says \(4, 8\)"
    ):
        check_op(raised, [(X,)], count=20)
    with pytest.raises(TypeError, match="is no operator"):
        check_op(lambda x: x, [(X,)])
    with pytest.raises(OpCheckError, match="no samples"):
        check_op(raised, [])
