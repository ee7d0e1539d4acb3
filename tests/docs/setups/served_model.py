"""A small model over token ids, and a call of it."""

from __future__ import annotations

import torch
from torch import nn

model = nn.Sequential(nn.Embedding(32_000, 4), nn.Linear(4, 4))
ids = torch.zeros(3, 5, dtype=torch.int64)
