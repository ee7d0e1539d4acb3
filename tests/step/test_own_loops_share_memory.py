"""A loop of one's own turns shared memory on for one of several models over the same ranks."""

from __future__ import annotations

import torch
from torch import nn

import torchloom
from support.pool import run_ranks
from torchloom.runtime import lookup
from torchloom.shard import layout_of


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return torchloom.shard_model(nn.Linear(6, 5), stage=3, persistence_threshold=1)


def three_models(rank: int):
    models = [small(0), small(1)]
    torchloom.compile(models[1], config={"symmetric_memory": True, "backend": "aot_eager"})
    models.append(small(2))
    handles = [layout_of(model).handle for model in models]
    shares = [lookup(handle).shares_memory for handle in handles]
    x = torch.full((2, 6), 1.0 + rank)
    losses = [model(x).square().mean() for model in models]
    for loss in losses:
        loss.backward()
    return len(set(handles)), shares, [loss.item() for loss in losses]


def plain(rank: int):
    x = torch.full((2, 6), 1.0 + rank)
    return [small(seed)(x).square().mean().item() for seed in range(3)]


def test_others_keep_their_communicators_and_results() -> None:
    found = run_ranks(2, three_models, timeout_s=300)
    wanted = run_ranks(2, plain, timeout_s=300)
    for (num_handles, shares, losses), losses_of_plain in zip(found, wanted, strict=True):
        assert num_handles == 3
        assert shares == [False, True, False]
        assert losses == losses_of_plain
