"""Scale the losses of fp16: by a static number, or by one that follows overflows.

Micikevicius et al., arXiv 1710.03740, section 3.2: the loss is multiplied so that small gradients
stay representable; a step whose gradients overflow is skipped and the scale halved; after a window
of good steps it doubles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchloom.config import LossScaleConfig
from torchloom.errors import NonFiniteError


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
