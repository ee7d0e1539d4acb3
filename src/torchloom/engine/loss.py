"""What a loss must be before gradients are computed from it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchloom.engine.user_backward import is_scaled
from torchloom.errors import EngineError


def check_loss(loss: Any) -> None:
    """Refuse what backward could not start from, in words that say what to do.

    Raises:
        EngineError: not a tensor, not one number, scaled already, or without a gradient.
    """
    if not isinstance(loss, Tensor):
        raise EngineError(
            f"backward() needs the loss tensor, got {type(loss).__name__}: pass the model's loss"
        )
    if loss.numel() != 1:
        raise EngineError(
            f"the loss has shape {tuple(loss.shape)}, it must be one number: reduce it, e.g. "
            "loss.mean()"
        )
    if not loss.requires_grad:
        raise EngineError(
            "the loss does not depend on any trainable parameter: it was computed under no_grad, "
            "detached, or every parameter is frozen"
        )
    if is_scaled(loss):
        raise EngineError(
            "the loss is multiplied by the loss scale already: call engine.scale(loss).backward(), or "
            "engine.backward(loss), which scales it by itself"
        )
