"""Which transport a group gets."""

from __future__ import annotations

import pytest

from torchloom.runtime.transports import TRANSPORTS, Asked


@pytest.mark.parametrize(
    ("backend", "num_ranks", "symmetric_memory", "names"),
    [
        ("gloo", 2, False, ["gloo", "c10d"]),
        ("gloo", 2, True, ["shared memory", "gloo", "c10d"]),
        ("gloo", 1, True, ["gloo", "c10d"]),
        ("nccl", 8, False, ["c10d"]),
        ("nccl", 8, True, ["shared memory", "c10d"]),  # which refuses, with a reason
        ("cpu:gloo,cuda:nccl", 8, False, ["gloo", "c10d"]),
    ],
)
def test_rows_in_the_order_in_which_they_are_tried(
    backend: str, num_ranks: int, symmetric_memory: bool, names: list[str]
) -> None:
    asked = Asked(backend, num_ranks, symmetric_memory)
    assert [row.name for row in TRANSPORTS if row.is_for(asked)] == names


def test_the_last_row_is_for_every_group() -> None:
    assert TRANSPORTS[-1].is_for(Asked("any", 1, False))
    assert len({row.name for row in TRANSPORTS}) == len(TRANSPORTS)
