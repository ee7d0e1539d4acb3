"""The norm that torch's clipping takes of gradients: one place, so that another can stand in for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

TotalNorm = Callable[..., Tensor]
"""(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None) -> norm."""


def replace_total_norm(make: Callable[[TotalNorm], TotalNorm]) -> None:
    """Put a function in the place of the norm in `torch.nn.utils.clip_grad_norm_` and `get_total_norm`.

    torch's function stays the object that it is, whoever imported it before: what it calls is replaced, under its
    `no_grad`.

    Args:
        make: takes torch's function and returns the one to use. Dynamo does not look into it.
    """
    outer: Any = clip_grad._get_total_norm
    cell = dict(zip(outer.__code__.co_freevars, outer.__closure__ or (), strict=True))["func"]
    cell.cell_contents = torch.compiler.disable(make(cell.cell_contents))
