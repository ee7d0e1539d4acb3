"""Memory budgets as users write them."""

from __future__ import annotations

import pytest

from torchloom.config.budget import MemoryBudget, parse_budget
from torchloom.config.kinds import RefusedError


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (12345, 12345),
        (2.5e9, 2_500_000_000),
        ("40GB", 40 * 10**9),
        ("40 GiB", 40 << 30),
        ("1.5g", 1_500_000_000),
        ("512mib", 512 << 20),
        ("7000", 7000),
        ("3e6 B", 3_000_000),
    ],
)
def test_sizes(written, num_bytes):
    budget = parse_budget(written)

    assert budget.num_bytes == num_bytes
    assert budget.resolve(10) == num_bytes


@pytest.mark.parametrize(("written", "part"), [(0.8, 8), ("80%", 8), ("0.5", 5), (1.0, 10)])
def test_parts_of_the_device(written, part):
    assert parse_budget(written).resolve(10) == part


def test_auto_leaves_a_tenth():
    assert parse_budget("auto").resolve(1000) == 900
    assert parse_budget(MemoryBudget(7)).resolve(1000) == 7


@pytest.mark.parametrize(
    "written", [0, -1, 0.0, -0.5, True, None, [1], "", "GB", "4 cows", "120%", "0%", float("nan")]
)
def test_what_is_no_budget(written):
    with pytest.raises(RefusedError, match="write bytes"):
        parse_budget(written)
