"""Small models with everything that makes sharding hard."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 31
SMALL_BUCKETS = {
    "reduce_bucket_size": 4_000,
    "allgather_bucket_size": 2_000,
    "stage3_prefetch_bucket_size": 4_000,
}
"""Elements in flight; without these the weights of `Deep` are one bucket."""


class Tricky(nn.Module):
    """Tied, frozen, odd-shaped, zero-sized, small and large parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.up = nn.Linear(12, 17)
        self.down = nn.Linear(17, 12)
        self.frozen = nn.Linear(12, 12)
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(12)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(12, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(-1, 1, 12))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.shift.to(x.dtype)
        x = x + self.frozen(self.down(F.gelu(self.up(x))))
        logits = self.head(self.norm(x)) + self.empty.sum()
        return F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())


def tricky(seed: int = 0) -> Tricky:
    """Make the model with reproducible weights that are nowhere zero."""
    torch.manual_seed(seed)
    return Tricky()


def tokens(step: int, rank: int, batch: int = 3, length: int = 7) -> Tensor:
    """Return token ids that depend on step and rank only."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)


class Deep(nn.Module):
    """Blocks around a residual, of odd widths."""

    def __init__(self) -> None:
        super().__init__()
        wide = (nn.Sequential(nn.Linear(37, 60), nn.GELU(), nn.Linear(60, 37)) for _ in range(6))
        self.blocks = nn.ModuleList(wide)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()
