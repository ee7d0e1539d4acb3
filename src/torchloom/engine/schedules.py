"""DeepSpeed's schedules as torch schedulers: each optimizer step takes the rate that DeepSpeed takes.

DeepSpeed counts from -1: a schedule is made at position -1, and each step that is not skipped moves it by
one. So a warmup takes its first rate twice, at positions -1 and 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchloom.config import Config, thawed_map
from torchloom.errors import ConfigError
from torchloom.log import get_logger

logger = get_logger(__name__)

PerGroup = float | Sequence[float]
"""One number, or one for each parameter group."""
_SECOND_BETA = 0.99


def make_lr_scheduler(config: Config, scheduler: Any, optimizer: Optimizer | None) -> Any:
    """Return the caller's schedule, one made by the caller's function, or the configured one.

    Args:
        config: says which schedule to build when the caller brings none.
        scheduler: a schedule, a function from the optimizer to one, or None.
        optimizer: whose learning rates follow it; without one the schedule is returned as it is.

    Raises:
        ConfigError: the schedule follows another optimizer, or does not take the configured arguments.
    """
    if optimizer is None:
        return scheduler
    if callable(scheduler):
        return scheduler(optimizer)
    if scheduler is None:
        if config.scheduler is None:
            return None
        params = thawed_map(config.scheduler.params)
        return make_scheduler(config.scheduler.name, params, optimizer)
    followed = getattr(scheduler, "optimizer", None)
    groups = getattr(followed, "param_groups", None)  # a wrapper shares the list of what it wraps
    if groups is not None and groups is not optimizer.param_groups:
        raise ConfigError(
            f"lr_scheduler={type(scheduler).__name__} follows another optimizer than the engine steps: "
            "make it of the optimizer that you pass as optimizer=, or pass a function from the optimizer "
            "to the schedule"
        )
    return scheduler


def make_scheduler(name: str, params: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """Build a schedule by its config name.

    Args:
        name: a schedule of DeepSpeed's, or a class of `torch.optim.lr_scheduler`.
        params: its keyword arguments.
        optimizer: the optimizer whose rates it sets.

    Raises:
        ConfigError: unknown name, or arguments that the schedule does not take.
    """
    try:
        made = _DEEPSPEED.get(name) or getattr(torch.optim.lr_scheduler, name)
        schedule: LRScheduler = made(optimizer, **params)
        return schedule
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"scheduler {name!r} with parameters {dict(params)}: {error}") from error


class Schedule(LRScheduler):
    """Sets rates by DeepSpeed's position, `last_epoch - 1`."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        kept = [
            {k: group[k] for k in ("lr", "betas") if k in group} for group in optimizer.param_groups
        ]
        super().__init__(optimizer)
        if last_batch_iteration >= 0:  # the first step keeps what the optimizer has
            for group, own, rate in zip(optimizer.param_groups, kept, self.base_lrs, strict=True):
                group.update(own, lr=rate)
            self.last_epoch = last_batch_iteration + 1

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step.

        Args:
            epoch: the position to move to; default: the next one.
        """
        if epoch is not None:
            self.last_epoch = epoch
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the rates in use; all else is settings."""
        rates: list[float | Tensor] = self.get_last_lr()
        return {"last_batch_iteration": self.last_epoch - 1, "rates": rates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position; the rates themselves are in the optimizer's state.

        Args:
            state_dict: what `state_dict` returned.
        """
        self.last_epoch = state_dict["last_batch_iteration"] + 1
        self._last_lr = list(state_dict["rates"])


class WarmupLR(Schedule):
    """The rate rises from `warmup_min_lr` to `warmup_max_lr` (default: the optimizer's), and stays."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _of_groups(optimizer, "warmup_min_lr", warmup_min_lr)
        self._high = None
        if warmup_max_lr is not None:
            self._high = _of_groups(optimizer, "warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        super().__init__(optimizer, last_batch_iteration)

    @property
    def max_lrs(self) -> list[Any]:
        """The rate of each group behind the warmup."""
        return self.base_lrs if self._high is None else self._high

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group."""
        done = max(0, self.last_epoch - 1)
        rising = done < self.warmup_num_steps
        share = (
            _rise(done, self.warmup_num_steps, self.warmup_type) if rising else self._after(done)
        )
        return [
            low + (top - low) * share for low, top in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _after(self, done: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """A warmup, then a linear fall to `warmup_min_lr`."""

    def __init__(self, optimizer: Optimizer, total_num_steps: int, **warmup: Any) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, **warmup)

    def _after(self, done: int) -> float:
        return max(
            0.0,
            (self.total_num_steps - done) / max(1, self.total_num_steps - self.warmup_num_steps),
        )


class WarmupCosineLR(Schedule):
    """The optimizer's rate times a ratio that rises, then falls along a cosine.

    DeepSpeed's first step has the ratio 0, whatever `warmup_min_ratio` is.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        self.total_num_steps = total_num_steps
        self._first, self._last = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """Return the part of the optimizer's rate at this position."""
        done = self.last_epoch - 1
        if done < 0:
            return 0.0
        if done < self.warmup_num_steps:
            share = _rise(done, self.warmup_num_steps, self.warmup_type)
            return self._first + (1 - self._first) * share
        fall = max(1, self.total_num_steps - self.warmup_num_steps)
        fallen = min(1.0, (done - self.warmup_num_steps + 1) / fall)
        return self._last + (1 - self._last) * (1 + math.cos(math.pi * fallen)) / 2


class LRRangeTest(Schedule):
    """The rate grows without end from `lr_range_test_min_lr`, to find the largest that trains."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._low = _of_groups(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self._step_size, self._growth = lr_range_test_step_size, lr_range_test_step_rate
        self._in_stairs = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group."""
        intervals = self.last_epoch / self._step_size
        growth = 1 + self._growth * (math.floor(intervals) if self._in_stairs else intervals)
        return [low * growth for low in self._low]


class OneCycle(Schedule):
    """The rate rises and falls once, then decays; Adam's first beta moves the other way."""

    def __init__(  # noqa: PLR0913  DeepSpeed's keywords
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        first, stairs = cycle_first_step_size, cycle_first_stair_count
        second = first if cycle_second_step_size is None else cycle_second_step_size
        self._sizes = (first, second)
        self.step_ratio = first / (first + second)
        self._stairs = (
            stairs,
            stairs if cycle_second_stair_count is None else cycle_second_stair_count,
        )
        self.min_lrs = _of_groups(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _of_groups(optimizer, "cycle_max_lr", cycle_max_lr)
        self._betas = (
            _of_groups(optimizer, "cycle_min_mom", cycle_min_mom),
            _of_groups(optimizer, "cycle_max_mom", cycle_max_mom),
        )
        self._decay = (decay_step_size, decay_lr_rate, decay_mom_rate)
        self._moves_betas = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self._moves_betas:
            logger.warning(
                "OneCycle leaves the momentum alone, as DeepSpeed does: %s has no betas; set "
                "cycle_momentum to false",
                type(optimizer).__name__,
            )
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group."""
        share, decay = self._share(), self._decayed(self._decay[1])
        rates = zip(self.min_lrs, self.max_lrs, strict=True)
        return [(low + (top - low) * share) / decay for low, top in rates]

    def step(self, epoch: int | None = None) -> None:
        """Set the rates and betas of the next step.

        Args:
            epoch: the position to move to; default: the next one.
        """
        super().step(epoch)
        if not self._moves_betas:
            return
        # DeepSpeed's first step takes the lowest beta, the others begin at the highest.
        betas = self._betas_at(self._share() if self.last_epoch else 1.0)
        for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = pair

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group at this position; None if they stay as they are."""
        return self._betas_at(self._share()) if self._moves_betas else None

    def _betas_at(self, share: float) -> list[tuple[float, float]]:
        growth = self._decayed(self._decay[2])
        pairs = zip(*self._betas, strict=True)
        return [((top - (top - low) * share) * growth, _SECOND_BETA) for low, top in pairs]

    def _share(self) -> float:
        """Return how far the cycle is up: 0 at its ends and behind it, 1 at its top."""
        first, second = self._sizes
        at = self.last_epoch % (first + second) if self.last_epoch <= first + second else 0
        rises = at <= first
        reached, size = (at, first) if rises else (first + second - at, second)
        stairs = self._stairs[0 if rises else 1]
        return math.floor(reached * stairs / size) / stairs if stairs > 0 else reached / size

    def _decayed(self, rate: float) -> float:
        """Return the factor of the decay behind the cycle."""
        behind, size = max(0, self.last_epoch - sum(self._sizes)), self._decay[0]
        return 1 + rate * behind / size if size else 1.0


_DEEPSPEED = {
    made.__name__: made for made in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


def _rise(done: int, num_steps: int, kind: str) -> float:
    """Return the share of the warmup at a position."""
    return done / num_steps if kind == "linear" else math.log(done + 1) / math.log(num_steps)


def _of_groups(optimizer: Optimizer, name: str, value: PerGroup) -> list[float]:
    num_groups = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [value] * num_groups
    if len(value) != num_groups:
        raise ConfigError(
            f"scheduler.params.{name}: {len(value)} values for {num_groups} parameter groups; write "
            "one for each group, or one number for all"
        )
    return list(value)
