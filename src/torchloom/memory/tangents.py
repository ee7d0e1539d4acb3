"""Gradients of results, with which backward begins: which of them outlive their last reader."""

from __future__ import annotations

from typing import Any

from torchloom._torch.partition import keeps_tangents


def is_kept(tangent: Any) -> bool:
    """Return whether a tensor, or a fake one, that backward begins with lives until its end.

    Who calls `backward()` holds the gradient of the loss. Those of other results end when they have been read,
    but for torch 2.11 and 2.12, where autograd's frame holds them.
    """
    return keeps_tangents() or getattr(tangent, "ndim", None) == 0
