"""Implementations of a matrix product, by name.

oneDNN is reached through the operator of torch's own fused linear layers. It takes a right operand
of either layout as it is; a transposed left operand is copied, which the measured figures contain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchloom._torch.onednn import has_onednn_linear, onednn_linear
from torchloom.ops.library import LIBRARY


def bind() -> None:
    """Register the body with the dispatcher."""
    LIBRARY.impl("matmul", _matmul, "CompositeExplicitAutograd")


def _matmul(a: Tensor, b: Tensor, bias: Tensor | None, kernel: str) -> Tensor:
    usable = a.device.type == "cpu" and a.numel() and b.numel()
    if kernel == "onednn" and usable and has_onednn_linear():
        return onednn_linear(a, b.t(), bias)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
