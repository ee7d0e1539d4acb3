"""Models of equal layers whose sizes may be symbols."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class Sized(nn.Module):
    """Equal layers that do something with the length of what they are given."""

    def __init__(self, what: str, dim: int = 24, layers: int = 5) -> None:
        super().__init__()
        self.what = what.replace(" ", "_")
        self.first = nn.Linear(dim, dim)
        self.ups = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + getattr(self, self.what)(up, down, x, x.shape[1])
        return x.square().mean()

    def power(self, up, down, x, length):
        return down(torch.tanh(up(x)) * length**-0.5)

    def logarithm(self, up, down, x, length):
        return down(torch.tanh(up(x)) * math.log(length + 1))

    def padded(self, up, down, x, length):
        return down(F.pad(up(x), (0, 0, length // 2, 0))[:, :length].tanh())

    def rolled(self, up, down, x, length):
        return down(up(x).roll(length // 2, 1).relu())

    def masked(self, up, down, x, length):
        mask = torch.full((length, length), float("-inf")).triu(1)
        scores = up(x) @ x.transpose(1, 2) / length**0.5 + mask
        return down(scores.softmax(-1) @ x)

    def shortened(self, up, down, x, length):
        made = up(x[:, : min(length, 16)]).tanh()
        return down(made.mean(1, keepdim=True).expand(-1, length, -1))

    def heads(self, up, down, x, length):
        query = up(x).view(x.shape[0], length, 4, -1).transpose(1, 2)
        made = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        return down(made.transpose(1, 2).reshape(x.shape))


class Shown(nn.Module):
    """Gives what backward reads as well, in another shape."""

    def __init__(self, dim: int = 24, layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.ups = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x):
        x, seen = self.first(x), []
        for up, down in zip(self.ups, self.downs, strict=True):
            made = up(x)
            x = x + down(made.sin())
            seen.append(made.view(*made.shape[:-1], 4, -1))
        return x.square().mean() + 0.1 * sum(each.cos().mean() for each in seen)
