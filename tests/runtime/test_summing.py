"""Sums of addends that come scaled: the bits of scaled sums, wherever no sum is subnormal."""

from __future__ import annotations

import math

import pytest
import torch

from torchloom.runtime.transports.summing import scales_early, sum_into, sum_scaled_into


def addends(num: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * num + numel)
    drawn = torch.randn(num, numel, generator=generator, dtype=dtype)
    exponents = torch.randint(-20, 20, (num, numel), generator=generator)
    return list(drawn * 2.0**exponents)


def both(parts, own, scale, out_numel):
    got, want = (torch.full((out_numel,), math.nan, dtype=parts[0].dtype) for _ in "ab")
    scaled = [part if rank == own else part * scale for rank, part in enumerate(parts)]
    sum_scaled_into(got, scaled, own, scale)
    sum_into(want, parts, scale)
    return got, want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num, scale", [(2, 0.5), (2, 1.0), (4, 0.25), (5, 2.0), (8, 0.125)])
@pytest.mark.parametrize("numel, padding", [(1, 0), (16, 3), (1_003, 1), (0, 2)])
def test_the_bits_of_a_scaled_sum(dtype, num, scale, numel, padding) -> None:
    one = torch.ones(1, dtype=dtype)
    assert scales_early(one, one, scale)
    for own in range(num):
        got, want = both(addends(num, numel, dtype), own, scale, numel + padding)
        assert torch.equal(got, want)
        assert not got[numel:].any()


def test_what_is_not_finite_stays_so() -> None:
    parts = [torch.tensor([math.inf, -math.inf, math.nan, 1.0]) for _ in range(3)]
    parts[1] = torch.tensor([-math.inf, -math.inf, 0.0, math.inf])
    for own in range(3):
        got, want = both(parts, own, 0.5, 4)
        assert got.isnan().tolist() == want.isnan().tolist() == [True, False, True, False]
        assert got.nan_to_num().equal(want.nan_to_num())


def test_only_subnormal_sums_may_differ_and_by_one_bit() -> None:
    smallest = 2.0**-149
    parts = [torch.tensor([3 * smallest, 2.0**-126]), torch.tensor([5 * smallest, 2.0**-126])]
    for own in range(2):
        got, want = both(parts, own, 0.5, 2)
        assert got[1] == want[1]
        assert (got - want).abs().max() <= smallest


def test_other_scales_and_types_are_scaled_as_sums() -> None:
    one = torch.ones(1)
    assert not scales_early(one, one, 1 / 3)
    assert not scales_early(one, one, 0.0)
    assert not scales_early(one.half(), one.half(), 0.5)
    assert not scales_early(one.bfloat16(), one, 0.5)
