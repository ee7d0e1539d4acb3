"""Weights that are mapped from files: once they are sharded, nothing keeps the files in memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import torchloom
from support.pool import run_ranks
from torchloom.shard import full_state_dict


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 65), nn.LayerNorm(65), nn.BatchNorm1d(65), nn.Linear(65, 3))


def is_mapped(file: Path) -> bool:
    return str(file) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_stays_whole_does_not_keep_the_file_mapped(tmp_path, stage) -> None:
    """Small weights, buffers, and at stage 1 those that are not sliced."""
    file = tmp_path / "weights.safetensors"
    save_file(model(0).state_dict(), file)

    def run(rank: int) -> tuple[bool, bool, dict[str, torch.Tensor]]:
        made = model(1)
        made.load_state_dict(load_file(file), assign=True)
        before = is_mapped(file)
        torchloom.shard_model(made, stage=stage, persistence_threshold=100)
        assert made[1].weight.shape == (65,)  # whole
        gc.collect()
        return before, is_mapped(file), full_state_dict(made, cpu=True)

    for before, after, weights in run_ranks(2, run):
        assert before
        assert not after
        for name, value in model(0).state_dict().items():
            assert torch.equal(weights[name], value), name
