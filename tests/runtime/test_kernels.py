"""The bound on what another implementation may change: four times the default's error."""

from __future__ import annotations

import pytest
import torch

import torchloom.runtime  # noqa: F401  binds the operators
from torchloom import ops
from torchloom._torch.onednn import has_onednn_linear
from torchloom.ops.compute import KERNELS

SHAPES = [(256, 512, 96), (7, 5, 3), (1, 512, 33), (33, 1000, 17), (128, 4096, 64), (3, 1, 9)]
BOUND = 4.0


def operand(rows: int, columns: int, layout: str, generator: torch.Generator) -> torch.Tensor:
    if layout == "n":
        return torch.randn(rows, columns, generator=generator)
    return torch.randn(columns, rows, generator=generator).t()


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result - exact).norm() / exact.norm()).item()


@pytest.mark.skipif(not has_onednn_linear(), reason="torch without oneDNN")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("layouts", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_at_most_four_times_the_default(shape, layouts, has_bias) -> None:
    generator = torch.Generator().manual_seed(hash((shape, layouts)) % 1000)
    m, k, n = shape
    a, b = (
        operand(m, k, layouts[0], generator),
        operand(k, n, layouts[1], generator),
    )
    bias = torch.randn(n, generator=generator) if has_bias else None
    exact = a.double() @ b.double() + (0 if bias is None else bias.double())
    default = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    rounding = torch.finfo(torch.float32).eps
    for kernel in KERNELS:
        result = ops.matmul(a, b, bias, kernel)
        assert result.is_contiguous()
        assert torch.equal(result, ops.matmul(a, b, bias, kernel))  # the same each time
        error = relative_error(result, exact)
        assert error <= BOUND * max(relative_error(default, exact), rounding)


def test_what_an_implementation_cannot_do_runs_on_torchs_own() -> None:
    a, b, bias = torch.randn(4, 6), torch.randn(6, 5), torch.randn(5)
    assert torch.equal(ops.matmul(a, b, bias, "one of tomorrow"), torch.addmm(bias, a, b))
    none = ops.matmul(torch.empty(4, 0), torch.empty(0, 5), bias, "onednn")
    assert torch.equal(none, bias.expand(4, 5))
    assert ops.matmul(torch.empty(0, 6), b, None, "onednn").shape == (0, 5)
