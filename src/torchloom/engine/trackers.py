"""Hand the numbers of steps over to trackers: any callable, and what a configuration asks for.

A tracker is not part of the training: one that raises costs a warning, and the next step calls it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torchloom.errors import ConfigError
from torchloom.events import StepEnded
from torchloom.log import get_logger

logger = get_logger(__name__)

LogMetrics = Callable[[dict[str, float], int], object]
"""Takes metrics by name and the number of the step, as `wandb.log` and `mlflow.log_metrics` do."""


@dataclass
class Tracker:
    """One receiver of steps."""

    tell: Callable[[StepEnded], object]
    name: str
    """For the warning."""
    every: int = 1
    close: Callable[[], object] | None = None
    """Called when the engine is destroyed."""
    _has_failed: bool = field(default=False, init=False)

    def is_due(self, step: int) -> bool:
        """Say whether it gets this step."""
        return step % self.every == 0

    def take(self, ended: StepEnded) -> None:
        """Hand a step over; an error is logged, the first time as a warning."""
        self._guarded(lambda: self.tell(ended), ended.step)

    def end(self, step: int) -> None:
        """Let it write what it holds back."""
        if self.close is not None:
            self._guarded(self.close, step)

    def _guarded(self, call: Callable[[], object], step: int) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  users' and libraries' code: disks, networks, anything
            if self._has_failed:
                logger.debug("step %d: %s failed again: %s", step, self.name, error)
                return
            self._has_failed = True
            logger.warning(
                "step %d: %s failed (%s: %s); training goes on, and later failures of it are not told",
                step,
                self.name,
                type(error).__name__,
                error,
            )


def tracker_of(log: LogMetrics, every: int, prefix: str) -> Tracker:
    """Return the tracker that calls a user's function.

    Args:
        log: the function.
        every: steps from one call to the next.
        prefix: in front of each name.

    Raises:
        ConfigError: `log` cannot be called, or `every` is not a positive number.
    """
    if not callable(log):
        raise ConfigError(
            f"log_to was given a {type(log).__name__}, which cannot be called: pass a function "
            "(metrics, step), such as wandb.log"
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(f"log_to(every={every!r}): write a whole number of steps, at least 1")
    name = getattr(log, "__qualname__", type(log).__name__)
    return Tracker(lambda ended: log(ended.metrics(prefix), ended.step), f"{name} of log_to", every)


def tags(ended: StepEnded) -> Mapping[str, float]:
    """Return the metrics of a step by the names that the monitors of a configuration write.

    DeepSpeed's names first, whose loss is that of rank 0 alone where the mean over ranks is not known.
    """
    loss = ended.rank_loss if ended.loss is None else ended.loss
    known = {"train_loss": loss, "lr": ended.lr, "loss_scale": ended.loss_scale}
    return {
        **{f"Train/Samples/{name}": value for name, value in known.items() if value is not None},
        **ended.metrics("torchloom/"),
    }
