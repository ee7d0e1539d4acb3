"""Models of equal layers that backward computes again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


class Checkpointed(nn.Module):
    """Computes each layer again in backward, random numbers included."""

    def __init__(self, dim: int = 24, layers: int = 5, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, 50), nn.GELU(), nn.Linear(50, dim), nn.Dropout(p)
            )
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


class Selective(nn.Module):
    """Each layer is checkpointed, and keeps what the policy with its name says."""

    def __init__(self, *policies: str, dim: int = 24) -> None:
        super().__init__()
        self.policies = policies
        self.first = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 50), nn.GELU(), nn.Linear(50, dim))
            for _ in policies
        )

    def forward(self, x):
        x = self.first(x)
        for layer, policy in zip(self.layers, self.policies, strict=True):
            x = x + torch.utils.checkpoint.checkpoint(
                layer, x, use_reentrant=False, context_fn=POLICIES[policy]
            )
        return x.square().mean()


def _keeping(*kept: Any) -> Callable[[], Any]:
    def policy(ctx, op, *args, **kwargs):
        name = CheckpointPolicy
        return name.MUST_SAVE if op in kept else name.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


POLICIES = {
    "products": _keeping(torch.ops.aten.addmm.default, torch.ops.aten.mm.default),
    "gelu": _keeping(torch.ops.aten.gelu.default),
    "nothing": _keeping(),
}
