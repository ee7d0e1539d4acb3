"""The optimizer step at the accumulation boundary.

collect    every leaf gets its averaged gradient
check      one global norm; not finite in 16 bit: the step is skipped on all ranks alike
clip       gradients shrink to `gradient_clipping`
step       torch's optimizer over this rank's leaves
publish    stage 1: all ranks get the slices that each has stepped
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchloom.config import Config
from torchloom.engine.clipping import clip_, global_norm, scale_
from torchloom.engine.local import LocalParams
from torchloom.engine.offloads import Offloads
from torchloom.engine.scaling import LossScaler
from torchloom.events import StepSkipped, emit
from torchloom.log import get_logger
from torchloom.runtime import Communicator

logger = get_logger(__name__)


@dataclass
class Update:
    """Applies what has accumulated."""

    config: Config
    local: LocalParams
    comm: Communicator
    scaler: LossScaler
    offloads: Offloads
    """Steps the optimizer, wherever its states live."""
    norm: Tensor | None = field(default=None, init=False)
    """The global gradient norm before clipping, of the last step that computed one."""

    def apply(self, optimizer: Optimizer, lr_scheduler: Any, *, reduce: bool, step: int) -> bool:
        """Step the weights once and drop the gradients.

        Args:
            optimizer: steps this rank's leaves.
            lr_scheduler: stepped after the optimizer, or None.
            reduce: gradients have accumulated locally and are averaged here.
            step: number of the optimizer step, for messages.

        Returns:
            Whether the step was applied; False if it was skipped.

        Raises:
            EngineError: too many steps in a row were skipped.
        """
        self.local.collect_gradients(
            reduce=reduce, bucket_bytes=self.config.zero.reduce_bucket_bytes
        )
        overflow = self._clip_and_check()
        if overflow:
            self._say_skipped(step)
        else:
            self.offloads.step(optimizer)
            self.comm.residents.invalidate()
            self.local.publish()
            if lr_scheduler is not None:
                lr_scheduler.step()
        self.local.zero_grad()
        self.scaler.update(overflow)
        return not overflow

    def _clip_and_check(self) -> bool:
        """Unscale and clip the gradients; return whether they are not finite."""
        precision, max_norm = self.config.precision, self.config.gradient_clipping
        checks = precision.dtype == "fp16" or (
            precision.dtype == "bf16" and precision.check_grad_overflow
        )
        self.norm = None
        divided, whole = self.local.gradients()
        if max_norm > 0 or checks:
            norm = global_norm(divided, whole, self.comm) / self.scaler.scale
            if checks and not bool(torch.isfinite(norm)):
                return True
            self.norm = norm
        if self.scaler.scale != 1.0:
            scale_([*divided, *whole], 1.0 / self.scaler.scale)
        if max_norm > 0 and self.norm is not None:
            clip_([*divided, *whole], self.norm, max_norm)
        return False

    def _say_skipped(self, step: int) -> None:
        scale, num_skipped = self.scaler.scale, self.scaler.num_skipped + 1
        emit(StepSkipped(step=step, loss_scale=scale, num_skipped=num_skipped))
        logger.warning(
            "step %d skipped: gradients are not finite (loss scale %g, %d skipped so far)",
            step,
            scale,
            num_skipped,
        )
