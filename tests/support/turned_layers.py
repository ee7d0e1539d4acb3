"""Models of equal layers whose gradients lie in memory in another order than the layers' results."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Convolved(nn.Module):
    """Residual convolutions and a head that sees pixels as rows."""

    def __init__(self, channels: int = 5, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, 7, 3, padding=1),
                nn.GroupNorm(1, 7),
                nn.GELU(),
                nn.Conv2d(7, channels, 1),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(channels, 11)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.permute(0, 2, 3, 1)).logsumexp(-1).mean()


class Turned(nn.Module):
    """Layers of rows and a head that reads them otherwise."""

    def __init__(self, what: str, dim: int = 24, layers: int = 5, length: int = 13) -> None:
        super().__init__()
        self.what = what.replace(" ", "_")
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(dim, 31) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(31, dim) for _ in range(layers))
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(dim)) for _ in range(layers))
        self.first = nn.Linear(dim, dim)
        self.over_rows = nn.Linear(length, 3)

    def forward(self, x):
        x = self.first(x)
        kept = []
        for norm, up, down, scale in zip(
            self.norms, self.ups, self.downs, self.scales, strict=True
        ):
            x = x + down(F.gelu(up(norm(x)))) * scale
            kept.append(x)
        return getattr(self, self.what)(x, kept)

    def over_length(self, x, kept):
        return self.over_rows(x.transpose(1, 2)).logsumexp(-1).mean()

    def last_row(self, x, kept):
        return x[:, -1].square().mean()

    def in_turn(self, x, kept):
        turned = [each.transpose(1, 2) if i % 2 else each for i, each in enumerate(kept)]
        return sum(each.contiguous().tanh().square().mean() for each in turned)


class Recomputed(Turned):
    """The same in the user's checkpoints: each layer reads its input several times there, and the head reads it, too."""

    def forward(self, x):
        x = self.first(x)
        kept = []
        layers = zip(self.norms, self.ups, self.downs, self.scales, strict=True)
        for norm, up, down, scale in layers:
            x = checkpoint(self.layer, x, norm, up, down, scale, use_reentrant=False)
            kept.append(x)
        return getattr(self, self.what)(x, kept)

    def layer(self, x, norm, up, down, scale):
        y = torch.addcmul(x, x, down(F.dropout(F.gelu(up(norm(x))), 0.2)), value=0.1)
        return x + y * scale.sigmoid()
