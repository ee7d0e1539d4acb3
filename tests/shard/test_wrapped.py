"""Models that a framework wrapped for data parallelism before torchloom saw them."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchloom
from support.models import tricky
from support.pool import run_ranks
from torchloom.errors import ShardError


def test_what_ddp_reduces_is_refused_where_it_would_be_cut() -> None:
    def fn(rank):
        wrapped = DistributedDataParallel(tricky())
        with pytest.raises(ShardError, match=r"^the model is wrapped .*prepare_model$"):
            torchloom.shard_model(wrapped, persistence_threshold=20)
        inside = nn.Sequential(DistributedDataParallel(nn.Linear(8, 8)))
        with pytest.raises(ShardError, match=r"^its module '0' is wrapped"):
            torchloom.shard_model(inside, persistence_threshold=20)
        torchloom.shard_model(wrapped, persistence_threshold=1_000_000)  # nothing is cut
        torchloom.shard_model(tricky(), persistence_threshold=20)

    run_ranks(2, fn)
