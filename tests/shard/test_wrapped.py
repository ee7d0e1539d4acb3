"""Models that a framework wrapped for data parallelism, before torchloom saw them or after."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchloom
from support.models import tricky
from support.pool import run_ranks
from torchloom.errors import ShardError


def test_ddp_around_shards_is_refused_before_it_changes_one() -> None:
    def fn(rank):
        model = tricky()
        torchloom.shard_model(model, persistence_threshold=20)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        for inner in (model, nn.Sequential(model)):
            with pytest.raises(ShardError, match="leave the wrapper out"):
                DistributedDataParallel(inner)
        assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
        whole = nn.Linear(8, 8)
        torchloom.shard_model(whole, persistence_threshold=1_000)
        DistributedDataParallel(whole)  # averages twice what is equal

    run_ranks(2, fn)


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
