"""DeepSpeed's warmup schedules as torch schedulers.

Formulas from the DeepSpeed documentation, "Learning Rate Schedulers": the rate rises from
`warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps` (logarithmically or linearly), then stays
(WarmupLR), falls linearly to 0 (WarmupDecayLR) or along a cosine (WarmupCosineLR).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchloom.errors import ConfigError


def make_scheduler(name: str, params: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """Build a schedule by its config name.

    Args:
        name: WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class of `torch.optim.lr_scheduler`.
        params: its keyword arguments.
        optimizer: the optimizer whose rates it sets.

    Raises:
        ConfigError: unknown name, or arguments that the schedule does not take.
    """
    own = {"WarmupLR": _warmup, "WarmupDecayLR": _warmup_decay, "WarmupCosineLR": _warmup_cosine}
    try:
        if name in own:
            return LambdaLR(optimizer, _relative_to_base(own[name], optimizer, params))
        return getattr(torch.optim.lr_scheduler, name)(optimizer, **params)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"scheduler {name!r} with parameters {dict(params)}: {error}") from error


Curve = Callable[..., Callable[[int], float]]


def _relative_to_base(
    curve: Curve, optimizer: Optimizer, params: Mapping[str, Any]
) -> list[Callable[[int], float]]:
    """LambdaLR multiplies each group's initial rate; the curves give absolute rates."""

    def of_group(group: dict[str, Any]) -> Callable[[int], float]:
        base = float(group["lr"])
        rate = curve(base_lr=base, **params)
        return lambda step: rate(step) / base if base else 0.0

    return [of_group(group) for group in optimizer.param_groups]


def _rise(step: int, num_steps: int, kind: str) -> float:
    """Return the share of the warmup that is done after `step` steps."""
    if step >= num_steps:
        return 1.0
    if kind == "linear":
        return step / num_steps
    return math.log(step + 1) / math.log(max(2, num_steps))


def _warmup(
    *,
    base_lr: float,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> Callable[[int], float]:
    top = base_lr if warmup_max_lr is None else warmup_max_lr
    return lambda step: (
        warmup_min_lr + (top - warmup_min_lr) * _rise(step, warmup_num_steps, warmup_type)
    )


def _warmup_decay(
    *, base_lr: float, total_num_steps: int, warmup_num_steps: int = 1000, **rest: Any
) -> Callable[[int], float]:
    rise = _warmup(base_lr=base_lr, warmup_num_steps=warmup_num_steps, **rest)

    def rate(step: int) -> float:
        if step < warmup_num_steps:
            return rise(step)
        left = max(0, total_num_steps - step) / max(1, total_num_steps - warmup_num_steps)
        return rise(step) * left

    return rate


def _warmup_cosine(
    *,
    base_lr: float,
    total_num_steps: int,
    warmup_num_steps: int = 1000,
    warmup_min_ratio: float = 0.0,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> Callable[[int], float]:
    def rate(step: int) -> float:
        if step < warmup_num_steps:
            rise = _rise(step, warmup_num_steps, warmup_type)
            return base_lr * (warmup_min_ratio + (1 - warmup_min_ratio) * rise)
        done = min(1.0, (step - warmup_num_steps) / max(1, total_num_steps - warmup_num_steps))
        cosine = (1 + math.cos(math.pi * done)) / 2
        return base_lr * (cos_min_ratio + (1 - cos_min_ratio) * cosine)

    return rate
