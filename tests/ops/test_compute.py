"""Matrix products by name: which products have a choice, and what their operator promises."""

from __future__ import annotations

import pytest
import torch

import torchloom.runtime  # noqa: F401  binds the operators
from torchloom import ops
from torchloom.ops.compute import Product, product_from

A, B, BIAS = torch.randn(7, 5), torch.randn(5, 3), torch.randn(3)


def test_operator_keeps_the_rules() -> None:
    for a, b, bias in ((A, B, None), (A, B, BIAS), (torch.randn(5, 7).t(), B, BIAS)):
        torch.library.opcheck(ops.matmul, (a, b, bias, "onednn"))


def test_layouts_are_told_apart() -> None:
    turned = torch.randn(5, 7).t()
    assert product_from(A, B, None) == Product(7, 5, 3, "n", "n", False)
    assert product_from(turned, torch.randn(3, 5).t(), BIAS) == Product(7, 5, 3, "t", "t", True)
    part = torch.randn(7, 20)[:, 4:9]  # rows are contiguous, with a gap between them
    assert product_from(part, B, None) == Product(7, 5, 3, "n", "n", False)
    keys = {product_from(a, B, bias).key for a in (A, turned) for bias in (None, BIAS)}
    assert len(keys) == 4


@pytest.mark.parametrize(
    "operands",
    [
        (A.double(), B.double(), None),
        (A.bfloat16(), B.bfloat16(), None),
        (A, B.to("meta"), None),
        (A, B, torch.randn(7, 3)),  # a whole matrix is added
        (A, B, torch.randn(1)),
        (A, B, BIAS.double()),
        (torch.randn(7, 1).expand(7, 5), B, None),
        (torch.randn(7, 10)[:, ::2], B, None),
        (A, None, None),
    ],
)
def test_others_have_no_choice(operands) -> None:
    assert product_from(*operands) is None
