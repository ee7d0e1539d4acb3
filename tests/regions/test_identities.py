"""Calls that return the tensor that they are given are left out of captured graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regions.test_find import captured
from torchloom.regions.normalize import drop_identities


def mixed(x):
    # The second, fourth and sixth of these are copies.
    return (
        x.to(torch.float32).sin(),
        x.to(torch.float64).sin(),
        x.contiguous().cos(),
        x.t().contiguous().cos(),
        x.type_as(x).exp(),
        x.to(x.dtype, copy=True).exp(),
        x.float().t() + 1,
    )


def written(x):
    x = x * 2
    same, other = x.float(), x.double()
    same.add_(1)
    other.add_(5)
    return x, other


def read_twice(x):
    h = x.sin()
    return (h.to(torch.float32) * h).sum() + h.float().sum()


@pytest.mark.parametrize(
    ("fn", "left"), [(mixed, ["to", "contiguous", "to"]), (written, ["double"]), (read_twice, [])]
)
def test_what_returns_its_own_tensor_is_dropped_and_copies_stay(fn: Any, left: list[str]) -> None:
    x = torch.randn(3, 4)
    gm = captured(fn, x)
    drop_identities(gm.graph)
    gm.graph.lint()
    gm.recompile()

    names = ("to", "float", "double", "contiguous", "type_as")
    assert [node.target for node in gm.graph.nodes if node.target in names] == left
    found, expected = gm(x), fn(x)
    for one, other in zip(
        found, expected if isinstance(expected, tuple) else [expected], strict=True
    ):
        assert torch.equal(one, other)


def test_sizes_may_be_symbols() -> None:
    x = torch.randn(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    gm = captured(mixed, x)
    drop_identities(gm.graph)
    gm.recompile()
    assert [node.target for node in gm.graph.nodes if node.op == "call_method"].count("to") == 2
