"""Products of torch's oneDNN build."""

from __future__ import annotations

import torch


def has_onednn_linear() -> bool:
    """Say whether torch was built with oneDNN and its linear operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias` computed by oneDNN.

    `weight` may have any strides; a transposed `x` is copied first.
    """
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
