"""A sharded model, an optimizer, and one step of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import torchloom

model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
torchloom.shard_model(model, stage=3, persistence_threshold=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
model(torch.randn(4, 8)).square().mean().backward()
optimizer.step()
__all__ = ["dist"]
