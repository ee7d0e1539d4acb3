"""What the example of the just-in-time compiler calls."""

from __future__ import annotations

import torch
from torch import nn

import torchloom


class A(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x * 2)


class B(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 3


def cancel_log_exp(gm) -> None:
    pass


x = torch.rand(3)
__all__ = ["torchloom"]
