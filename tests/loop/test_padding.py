"""Batches padded to one shape on all ranks."""

from __future__ import annotations

import pytest
import torch

import torchloom
from support.pool import run_ranks
from torchloom.errors import DataError


def test_ranks_pad_to_the_longest():
    def fn(rank):
        length = 3 + 2 * rank
        ids = torch.arange(2.0 * length).view(2, length)
        mask = torch.ones(4 - rank, 2, dtype=torch.int64).t()
        return torchloom.pad_tensors([(ids, 1, -1), (mask, -1, 0)])

    (ids, mask), (longest, shortest) = run_ranks(2, fn)
    assert ids.shape == longest.shape == (2, 5)
    assert ids[1].tolist() == [3, 4, 5, -1, -1]
    assert torch.equal(longest, torch.arange(10.0).view(2, 5))
    assert mask.stride() == shortest.stride() == (4, 1)
    assert shortest.tolist() == [[1, 1, 1, 0]] * 2


def test_without_ranks_and_with_bad_input():
    ids = torch.ones(2, 3)
    (padded,) = torchloom.pad_tensors([(ids, 0, 0)])
    assert torch.equal(padded, ids)
    assert padded.data_ptr() != ids.data_ptr()
    assert torchloom.pad_tensors([]) == []
    with pytest.raises(DataError, match=r"dim 2 .*\(2, 3\).*0 to 1"):
        torchloom.pad_tensors([(ids, 2, 0)])
