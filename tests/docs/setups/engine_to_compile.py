"""An engine before it is compiled."""

from __future__ import annotations

from torch import nn

import torchloom

config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
engine, *_ = torchloom.initialize(model=model, config=config)
