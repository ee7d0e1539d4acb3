"""The norm that torch's clipping takes of gradients: one place, so that another can stand in for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

TotalNorm = Callable[..., Tensor]
"""(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None) -> norm."""


def replace_total_norm(make: Callable[[TotalNorm], TotalNorm]) -> None:
    """Put a function in the place of the norm in `torch.nn.utils.clip_grad_norm_` and `get_total_norm`.

    A program that imported `clip_grad_norm_` before gets the new norm as well; one that imported
    `get_total_norm` before keeps torch's.

    Args:
        make: takes torch's function and returns the one to use. Dynamo does not look into it.
    """
    original = clip_grad._get_total_norm
    norm = torch.no_grad()(torch.compiler.disable(make(original), recursive=False))
    clip_grad._get_total_norm = norm  # type: ignore[assignment]
    torch.nn.utils.get_total_norm = norm  # type: ignore[assignment]
