"""A small model over token ids, and a call of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32_000, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


model = Model()
ids = torch.zeros(3, 5, dtype=torch.int64)
