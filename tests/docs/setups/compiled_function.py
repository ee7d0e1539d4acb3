"""A compiled function, and batches for it."""

from __future__ import annotations

import torch

import torchloom


def my_function(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sin()


compiled = step = torch.compile(my_function, backend="aot_eager")
batch = torch.randn(3, requires_grad=True)
batches = [batch, batch]
__all__ = ["step", "torchloom"]
