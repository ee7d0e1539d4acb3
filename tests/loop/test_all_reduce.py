"""`torchloom.all_reduce`: figures of all ranks, and ranks that reduce different things."""

from __future__ import annotations

import pytest
import torch

import torchloom
from support.pool import run_ranks
from torchloom.errors import AgreementError


def test_each_operation_over_two_ranks() -> None:
    def fn(rank):
        value = torch.tensor([[1.0, 5.0], [2.0, -1.0]]).T * (rank + 1)  # not contiguous
        found = {op: torchloom.all_reduce(value, op, name="x") for op in OPS}
        scalar = torchloom.all_reduce(torch.tensor(float(rank)), name="loss")
        return value, found, scalar

    (first, found, scalar), (second, other, _) = run_ranks(2, fn)
    both = torch.stack([first, second])
    wanted = {"mean": both.mean(0), "sum": both.sum(0), "min": both.amin(0), "max": both.amax(0)}
    for op in OPS:
        assert found[op].equal(wanted[op])
        assert other[op].equal(wanted[op])
    assert scalar.equal(torch.tensor(0.5))


OPS = ("mean", "sum", "min", "max")


@pytest.mark.parametrize("op", OPS)
def test_one_process_gets_a_copy(op: str) -> None:
    value = torch.tensor([1.0, 2.0])
    found = torchloom.all_reduce(value, op, name="x")
    assert found.equal(value)
    found.zero_()
    assert value[1] == 2.0


def test_other_operations_are_refused() -> None:
    with pytest.raises(ValueError, match="'mean', 'sum', 'min' or 'max'"):
        torchloom.all_reduce(torch.ones(1), "avg", name="x")


def test_ranks_that_reduce_different_things_are_told() -> None:
    def fn(rank):
        with pytest.raises(AgreementError) as caught:
            torchloom.all_reduce(torch.ones(1), name=("loss", "accuracy")[rank])
        return str(caught.value)

    for message in run_ranks(2, fn):
        assert "loss" in message
        assert "accuracy" in message
