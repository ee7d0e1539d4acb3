"""Take the optimizer step at the accumulation boundary.

collect    average gradients over ranks; each parameter gets the part that this rank steps
check      compute one global norm; if it is not finite, all ranks skip the step or end the run
clip       scale gradients down to `gradient_clipping`
step       run torch's optimizer over this rank's shards
publish    stage 1: gather the slices that each rank has stepped

In fp16 the loss is scaled (Micikevicius et al., arXiv 1710.03740, section 3.2): it is multiplied so that small gradients
stay representable; a step whose gradients overflow is skipped and the scale halved; after a window of good steps it doubles.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchloom.config import Config, LossScaleConfig
from torchloom.errors import NonFiniteError
from torchloom.events import StepSkipped, emit
from torchloom.log import get_logger
from torchloom.loop.clip import NonFinite, find_non_finite
from torchloom.loop.offloads import Offloads
from torchloom.loop.optimizers import complete_momentum
from torchloom.loop.owned_params import OwnedParams
from torchloom.runtime import Communicator


@dataclass
class LossScaler:
    """The scale of one run. `config` None means that nothing is scaled."""

    config: LossScaleConfig | None
    max_consecutive_skips: int = 50
    scale: float = field(init=False, default=1.0)
    num_skipped: int = 0
    _good_steps: int = 0
    _forgiveness: int = field(init=False, default=1)
    _skips_in_a_row: int = 0

    def __post_init__(self) -> None:
        if self.config is not None:
            self.scale = self.config.static_scale or 2.0**self.config.initial_scale_power
            self._forgiveness = self.config.hysteresis

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step that was skipped (`overflow`) or taken.

        Raises:
            NonFiniteError: too many steps were skipped in a row.
        """
        if overflow:
            self.num_skipped += 1
            self._skips_in_a_row += 1
        else:
            self._skips_in_a_row = 0
        if self._skips_in_a_row > self.max_consecutive_skips:
            raise NonFiniteError(
                f"{self._skips_in_a_row} optimizer steps in a row had gradients that are not "
                f"finite (loss scale {self.scale:g}), more than max_consecutive_skips = "
                f"{self.max_consecutive_skips}: the run has diverged; lower the learning rate, and "
                "resume from an earlier checkpoint"
            )
        if self.config is None or self.config.static_scale:
            return
        if overflow:
            self._shrink(self.config)
        else:
            self._grow(self.config)

    def _shrink(self, config: LossScaleConfig) -> None:
        self._good_steps = 0
        if self._forgiveness > 1:
            self._forgiveness -= 1
            return
        self.scale = max(config.min_scale, self.scale / 2)

    def _grow(self, config: LossScaleConfig) -> None:
        self._good_steps += 1
        if config.consecutive_hysteresis:
            self._forgiveness = config.hysteresis
        if self._good_steps % config.window == 0:
            self.scale *= 2
            self._forgiveness = config.hysteresis

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {
            "scale": self.scale,
            "num_skipped": self.num_skipped,
            "good_steps": self._good_steps,
            "forgiveness": self._forgiveness,
            "skips_in_a_row": self._skips_in_a_row,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint."""
        self.scale = float(state["scale"])
        self.num_skipped = int(state["num_skipped"])
        self._good_steps = int(state["good_steps"])
        self._forgiveness = int(state["forgiveness"])
        self._skips_in_a_row = int(state["skips_in_a_row"])


logger = get_logger(__name__)

_BUCKET_BYTES = 16 << 20
"""Of gradients that are averaged at the accumulation boundary, where settings do not say."""
MAX_LOSSES = 1024
"""Number of losses kept per step, for loops that never step."""


@dataclass
class Update:
    """Steps the optimizer with the accumulated gradients."""

    config: Config
    local: OwnedParams
    comm: Communicator
    scaler: LossScaler
    offloads: Offloads
    """Steps the optimizer, wherever its states live."""
    norm: Tensor | None = field(default=None, init=False)
    """The global gradient norm before clipping, of the last step that computed one."""
    losses: deque[Tensor] = field(default_factory=lambda: deque(maxlen=MAX_LOSSES), init=False)
    """Of the micro-steps since the last step, to say which rank's was not finite."""
    loss_sums: Tensor | None = field(default=None, init=False)
    """Losses, ranks and tokens summed over all ranks, of the last step that computed a norm; see
    `norm_and_sums`."""
    stepped_losses: tuple[Tensor, ...] = field(default=(), init=False)
    """This rank's losses of the last step."""
    stop_reason: str | None = field(default=None, init=False)
    """Why the run should end, once `non_finite: stop` has skipped a step."""

    def apply(
        self,
        optimizer: Optimizer,
        lr_scheduler: Any,
        lr_kwargs: Mapping[str, Any],
        *,
        reduce: bool,
        step: int,
        tokens: float,
    ) -> bool:
        """Step the weights once and drop the gradients.

        Args:
            optimizer: steps this rank's leaves.
            lr_scheduler: stepped after the optimizer, or None.
            lr_kwargs: arguments of its step.
            reduce: gradients have accumulated locally and are averaged here.
            step: number of the optimizer step.
            tokens: of this rank's batches; NaN if not known.

        Returns:
            Whether the step was applied; False if it was skipped.

        Raises:
            NonFiniteError: gradients are not finite and the settings say `raise`, or too many steps
                in a row were skipped, or the run goes on after `stop`. On all ranks alike; weights
                and optimizer are as before the step.
        """
        if self.stop_reason is not None:
            raise NonFiniteError(
                f"the run was to end at step {step} ({self.stop_reason}): leave the loop when "
                "engine.should_stop is true, and resume from a checkpoint"
            )
        self.local.settle()
        asked_bytes = self.config.zero.reduce_bucket_bytes
        bucket_bytes = _BUCKET_BYTES if asked_bytes is None else asked_bytes
        with self.local.stepping(reduce=reduce, bucket_bytes=bucket_bytes):
            found = self._check(tokens)
            if found is None:
                self._clip()
                complete_momentum(optimizer)
                self.local.begin_update()
                self.offloads.step(optimizer, step)
        if found is None:
            self.local.settle()
            if lr_scheduler is not None:
                lr_scheduler.step(**lr_kwargs)
        self.stepped_losses = tuple(self.losses)
        self.losses.clear()
        if found is not None:
            self._refuse(found, step)
        self.scaler.update(found is not None)
        return found is None

    def go_on(self) -> None:
        """Clear `stop_reason` after a load: the step that caused it is undone."""
        self.stop_reason = None
        self.losses.clear()

    def _check(self, tokens: float) -> NonFinite | None:
        """Compute the global norm if anything asks for it; return what is not finite."""
        checks = self.config.non_finite.checks
        self.norm = self.loss_sums = None
        if self.config.gradient_clipping == 0 and not checks:
            return None
        gradients = self.local.gradients()
        norm, self.loss_sums = gradients.norm_and_sums(self.losses, tokens)
        if checks and not math.isfinite(norm.item()):
            found = find_non_finite(*self.local.named_gradients(), self.losses, self.comm)
            if found is not None:
                return found
            norm = gradients.norm(dtype=torch.float64)
        self.norm = norm if self.scaler.scale == 1.0 else norm / self.scaler.scale
        return None

    def _clip(self) -> None:
        """Unscale and clip the gradients."""
        gradients = self.local.gradients()
        if self.scaler.scale != 1.0:
            gradients.scale_(1.0 / self.scaler.scale)
        if self.config.gradient_clipping > 0 and self.norm is not None:
            gradients.clip_(self.norm, self.config.gradient_clipping)

    def _refuse(self, found: NonFinite, step: int) -> None:
        """Log that a step is skipped, or raise, by `non_finite`."""
        policy, scale = self.config.non_finite.policy, self.scaler.scale
        if policy == "raise":
            raise NonFiniteError(
                f"step {step}: {found}. Weights and optimizer are as before the step: look at its "
                'batch, lower the learning rate, or set non_finite to "skip"'
            )
        num_skipped = self.scaler.num_skipped + 1
        emit(
            StepSkipped(
                step=step,
                loss_scale=scale,
                num_skipped=num_skipped,
                param=found.param,
                rank=found.rank,
                value=found.kind,
                loss_rank=None if found.loss is None else found.loss.rank,
            )
        )
        logger.warning(
            "step %d skipped: %s (loss scale %g, %d skipped so far)",
            step,
            found,
            scale,
            num_skipped,
        )
        if policy == "stop":
            self.stop_reason = f"step {step} was dropped: {found}"
