"""Count the work of a step: tokens of a batch, FLOPs of a token, peak of the device.

    FLOPs per token = 6 for each trained element of a matrix, 4 for each frozen one

Forward takes 2 FLOPs per element, the gradients of inputs and of weights 2 each (Kaplan et al., arXiv
2001.08361, section 2.1); MFU is this rate over the device's dense bf16 peak, whatever the dtype of the run
(Chowdhery et al., arXiv 2204.02311, appendix B). The formula takes each token through each matrix once. It
leaves out products of activations with each other (attention) and what backward computes again. Matrices
that are only looked up (embeddings that no other module shares) do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.costs.hardware import peak_tflops
from torchloom.shard import Layout

_INTEGERS = (torch.int64, torch.int32)
TokensOf = Callable[..., int | None]


@dataclass
class Work:
    """What tokens per second and MFU rest on; assign a field to replace what torchloom assumes.

    Example:
        >>> engine.work.flops_per_token = 6 * 2.4e9  # doctest: +SKIP
        >>> engine.work.tokens_of = lambda batch: int(batch.mask.sum())  # doctest: +SKIP
    """

    flops_per_token: float | None
    """FLOPs of forward and backward per token; None: not known, so there is no MFU."""
    peak_tflops: float | None
    """Dense bf16 peak of the device in TFLOP/s; None: not known, so there is no MFU."""
    tokens_of: TokensOf = field(default_factory=lambda: _tokens_of)
    """Gets the arguments of a forward call, returns the number of its tokens, or None."""

    def mfu(self, tokens_per_second: float | None) -> float | None:
        """Return the utilization by a rank's tokens per second, from 0 to 1; None where it is not known."""
        if tokens_per_second is None or self.flops_per_token is None or self.peak_tflops is None:
            return None
        return tokens_per_second * self.flops_per_token / (1e12 * self.peak_tflops)


def work_of(model: nn.Module, layout: Layout, device: torch.device) -> Work:
    """Return what is known of a sharded model's work on a device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Work(flops_per_token=_flops_per_token(model, layout), peak_tflops=peak_tflops(name))


def _flops_per_token(model: nn.Module, layout: Layout) -> float | None:
    """Return the FLOPs by the formula; None where it does not hold.

    Convolutions use each element many times per sample, and of a mixture of experts a token uses few.
    """
    flops = 0
    for spec in layout:
        if len(spec.shape) > 2 or "expert" in spec.name:
            return None
        owners = [model.get_submodule(owner.module) for owner in spec.owners]
        is_lookup = all(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in owners)
        if len(spec.shape) == 2 and not is_lookup:
            flops += (6 if spec.requires_grad else 4) * spec.numel
    return float(flops) if flops else None


def _tokens_of(*args: Any, **kwargs: Any) -> int | None:
    """Return the elements of `input_ids`, or of a first argument that holds integers."""
    first = args[0] if args else None
    given = first if isinstance(first, Mapping) else kwargs
    ids = given.get("input_ids", first)
    if isinstance(ids, Tensor) and ids.dtype in _INTEGERS:
        return ids.numel()
    return None
