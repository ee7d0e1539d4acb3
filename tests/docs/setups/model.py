"""A model and a batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchloom

model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
batch = torch.randn(4, 512)
__all__ = ["Tensor", "batch", "dist", "model", "nn", "torch", "torchloom"]
