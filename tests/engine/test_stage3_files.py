"""ZeRO-3 files of public repositories train through `initialize`, with the values that a Trainer fills in."""

from __future__ import annotations

import copy

import pytest
import torch

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from support.runs import micro_step
from support.stage3_files import SHAPES, Tree, filled
from torchloom.shard import local_shard

NUM_RANKS = 2
KINDS = (
    "warmup, both offloaded",
    "decay, two parameters",
    "cosine, large scale",
    "plain, offloaded",
    "plain, own sizes",
    "an Accelerate YAML at the top",
    "own optimizer, precision left open",
    "numbers as text",
)
"""One shape of each kind. Their losses are those of stage 0 with the same types, but for the order of sums."""


def unsharded(config: Tree) -> Tree:
    """Return the same run with nothing sharded and nothing offloaded."""
    found = copy.deepcopy(config)
    found["zero_optimization"] = {"stage": 0}
    return found


@pytest.mark.parametrize("name", KINDS)
def test_two_steps(name):
    (config,) = (copy.deepcopy(shape.config) for shape in SHAPES if shape.name == name)
    # A number in the file is meant for large models: it would leave this one whole.
    config["zero_optimization"].setdefault("stage3_param_persistence_threshold", 0)
    if isinstance(config["zero_optimization"]["stage3_param_persistence_threshold"], float):
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    def losses(rank, config):
        values = {
            **filled(config, NUM_RANKS),
            "fp16.enabled": "bf16" not in config and "optimizer" not in config,
            "zero_optimization.stage3_param_persistence_threshold": 0,
        }
        model = tricky(0)
        optimizer = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), 1e-3)
        engine, *_ = torchloom.initialize(
            model=model, optimizer=optimizer, config=config, auto=values
        )
        found = []
        while engine.global_steps < 2:
            found.append(micro_step(engine, tokens(engine.micro_steps, rank)))
        assert engine.skipped_steps == 0
        return found, sum(local_shard(param).numel() for param in model.parameters())

    sharded = run_ranks(NUM_RANKS, losses, config)
    whole = run_ranks(NUM_RANKS, losses, unsharded(config))

    for (found, held), (expected, total) in zip(sharded, whole, strict=True):
        assert held < 0.6 * total
        assert found == pytest.approx(expected, rel=1e-6)
