"""DeepSpeed's schedules as torch schedulers: each optimizer step takes the rate that DeepSpeed takes.

DeepSpeed counts from -1: a schedule is made at position -1, and each step that is not skipped moves it by
one. So a warmup takes its first rate twice, at positions -1 and 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
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


@dataclass(eq=False, repr=False)
class Schedule(LRScheduler):
    """Sets rates by DeepSpeed's position, `last_epoch - 1`; its fields are DeepSpeed's arguments."""

    optimizer: Optimizer
    last_batch_iteration: int = field(default=-1, kw_only=True)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if str(each.type).startswith("PerGroup") and value is not None:
                setattr(self, each.name, _of_groups(self.optimizer, each.name, value))
        kept = [
            {k: group[k] for k in ("lr", "betas") if k in group}
            for group in self.optimizer.param_groups
        ]
        super().__init__(self.optimizer)
        if self.last_batch_iteration >= 0:  # the first step keeps what the optimizer has
            groups = self.optimizer.param_groups
            for group, own, rate in zip(groups, kept, self.base_lrs, strict=True):
                group.update(own, lr=rate)
            self.last_epoch = self.last_batch_iteration + 1

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


@dataclass(eq=False, repr=False, kw_only=True)
class _Warmup(Schedule):
    """Begins with a rise."""

    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def __post_init__(self) -> None:
        self.warmup_num_steps = max(2, self.warmup_num_steps)
        super().__post_init__()

    def _rise(self, done: int) -> float | None:
        """Return the share of the warmup at a position; None behind it."""
        if done >= self.warmup_num_steps:
            return None
        if self.warmup_type == "linear":
            return done / self.warmup_num_steps
        return math.log(done + 1) / math.log(self.warmup_num_steps)


@dataclass(eq=False, repr=False, kw_only=True)
class WarmupLR(_Warmup):
    """The rate rises from `warmup_min_lr` to `warmup_max_lr` (default: the optimizer's), and stays."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None

    @property
    def min_lrs(self) -> Any:
        """The rate of each group before the warmup."""
        return self.warmup_min_lr

    @property
    def max_lrs(self) -> Any:
        """The rate of each group behind the warmup."""
        return self.base_lrs if self.warmup_max_lr is None else self.warmup_max_lr

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group."""
        done = max(0, self.last_epoch - 1)
        rise = self._rise(done)
        share = self._after(done) if rise is None else rise
        rates = zip(self.min_lrs, self.max_lrs, strict=True)
        return [low + (top - low) * share for low, top in rates]

    def _after(self, done: int) -> float:
        return 1.0


@dataclass(eq=False, repr=False, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """A warmup, then a linear fall to `warmup_min_lr`."""

    total_num_steps: int

    def _after(self, done: int) -> float:
        fall = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - done) / fall)


@dataclass(eq=False, repr=False, kw_only=True)
class WarmupCosineLR(_Warmup):
    """The optimizer's rate times a ratio that rises, then falls along a cosine.

    DeepSpeed's first step has the ratio 0, whatever `warmup_min_ratio` is.
    """

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """Return the part of the optimizer's rate at this position."""
        done = self.last_epoch - 1
        if done < 0:
            return 0.0
        rise, low = self._rise(done), self.cos_min_ratio
        if rise is not None:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * rise
        fall = max(1, self.total_num_steps - self.warmup_num_steps)
        fallen = min(1.0, (done - self.warmup_num_steps + 1) / fall)
        return low + (1 - low) * (1 + math.cos(math.pi * fallen)) / 2


@dataclass(eq=False, repr=False, kw_only=True)
class LRRangeTest(Schedule):
    """The rate grows without end from `lr_range_test_min_lr`, to find the largest that trains."""

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group."""
        intervals = self.last_epoch / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        lows: Any = self.lr_range_test_min_lr
        return [low * (1 + self.lr_range_test_step_rate * intervals) for low in lows]


@dataclass(eq=False, repr=False, kw_only=True)
class OneCycle(Schedule):
    """The rate rises and falls once, then decays; Adam's first beta moves the other way."""

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = 2000
    cycle_second_step_size: float | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: float = 0
    cycle_momentum: bool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: float = 0.0

    def __post_init__(self) -> None:
        first, stairs = self.cycle_first_step_size, self.cycle_first_stair_count
        second, more = self.cycle_second_step_size, self.cycle_second_stair_count
        self._sizes = (first, first if second is None else second)
        self._stairs = (stairs, stairs if more is None else more)
        self._moves_betas = self.cycle_momentum and "betas" in self.optimizer.defaults
        if self.cycle_momentum and not self._moves_betas:
            logger.warning(
                "OneCycle leaves the momentum alone, as DeepSpeed does: %s has no betas; set "
                "cycle_momentum to false",
                type(self.optimizer).__name__,
            )
        super().__post_init__()

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group."""
        share, decay = self._share(), self._decayed(self.decay_lr_rate)
        lows, tops = self.cycle_min_lr, self.cycle_max_lr
        return [(low + (top - low) * share) / decay for low, top in zip(lows, tops, strict=True)]  # type: ignore[arg-type]

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
        growth = self._decayed(self.decay_mom_rate)
        pairs = zip(self.cycle_min_mom, self.cycle_max_mom, strict=True)  # type: ignore[arg-type]
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
        behind, size = max(0, self.last_epoch - sum(self._sizes)), self.decay_step_size
        return 1 + rate * behind / size if size else 1.0


_DEEPSPEED = {
    made.__name__: made for made in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


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
