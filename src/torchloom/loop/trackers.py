"""Hand the numbers of steps over to trackers: any callable, and what a configuration asks for.

A tracker is not part of the training. One that raises costs a warning, and is called again after 1, 2, 4, ...
steps: a server that is down may let each call wait for minutes.

Sections of a configuration and their folders are DeepSpeed's, and so are the names `Train/Samples/...`, over the number of
samples. Beside them stand all metrics of a step under `torchloom/`. Rank 0 writes; where it cannot, it says so once.
"""

from __future__ import annotations

import csv
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchloom.config import MonitorsConfig
from torchloom.errors import ConfigError
from torchloom.events import StepEnded
from torchloom.files import open_to_append
from torchloom.log import get_logger

logger = get_logger(__name__)

MAX_PAUSE = 1024
"""Steps after which a tracker that has failed often is called again."""

LogMetrics = Callable[[dict[str, float], int], object]
"""Takes metrics by name and the number of the step, as `wandb.log` and `mlflow.log_metrics` do."""


@dataclass
class Tracker:
    """One receiver of steps."""

    tell: Callable[[StepEnded], object]
    name: str
    """For the warning."""
    every: int = 1
    open: Callable[[], object] | None = None
    """Called once, before the first step."""
    close: Callable[[], object] | None = None
    """Called when the engine is destroyed."""
    _has_failed: bool = field(default=False, init=False)
    _failed_at: int = field(default=0, init=False)
    _pause: int = field(default=0, init=False)
    """Steps from the last failure to the next call; 0 after a success."""

    def is_due(self, step: int) -> bool:
        """Say whether it gets this step."""
        return step % self.every == 0 and step >= self._failed_at + self._pause

    def begin(self) -> bool:
        """Let it open what it writes to; say whether it could."""
        return self.open is None or self._is_done(self.open, 0)

    def take(self, ended: StepEnded) -> None:
        """Hand a step over; the first failure is logged as a warning."""
        if self._is_done(lambda: self.tell(ended), ended.step):
            self._pause = 0
        else:
            self._failed_at, self._pause = ended.step, min(2 * self._pause or 1, MAX_PAUSE)

    def end(self, step: int) -> None:
        """Let it write what it holds back."""
        if self.close is not None:
            self._is_done(self.close, step)

    def _is_done(self, call: Callable[[], object], step: int) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001  users' and libraries' code: disks, networks, anything
            level = logging.DEBUG if self._has_failed else logging.WARNING
            logger.log(
                level,
                "step %d: %s failed (%s: %s); training goes on, and its later failures are not told",
                step,
                self.name,
                type(error).__name__,
                error,
            )
            self._has_failed = True
            return False
        return True


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


def trackers_of(monitors: MonitorsConfig) -> list[Tracker]:
    """Open what a configuration asks for; return a tracker for each section that could be opened."""
    asked = (
        ("tensorboard", TensorBoardMonitor, monitors.tensorboard),
        ("wandb", WandbMonitor, monitors.wandb),
        ("csv_monitor", CsvMonitor, monitors.csv),
    )
    found = []
    for name, kind, section in asked:
        if section is not None:
            monitor = kind(section)
            found.append(
                Tracker(monitor, f"{name} of the config", open=monitor.open, close=monitor.close)
            )
    return [tracker for tracker in found if tracker.begin()]


class _Monitor:
    """One receiver of steps."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._into: Any = None
        """What it writes to."""

    def open(self) -> None:
        """Make or find what it writes to."""

    def close(self) -> None:
        """Write what is held back."""


class TensorBoardMonitor(_Monitor):
    """Writes event files; each step can be read at once."""

    def open(self) -> None:
        """Begin a file of this run."""
        board: Any = importlib.import_module("torch.utils.tensorboard")  # an optional package
        self._into = board.SummaryWriter(log_dir=str(self._config.folder.absolute()))

    def __call__(self, ended: StepEnded) -> None:
        """Write one step."""
        if self._into is None:
            self.open()
        writer: Any = self._into
        self._into = None  # a writer that has failed once fails for good
        for name, value in tags(ended).items():
            writer.add_scalar(name, value, ended.samples)
        writer.flush()
        self._into = writer

    def close(self) -> None:
        """Write what is held back."""
        if self._into is not None:
            self._into.close()


class WandbMonitor(_Monitor):
    """Logs to the program's run, or starts one; wandb ends it with the program."""

    def open(self) -> None:
        """Find the program's run, or start one."""
        wandb: Any = importlib.import_module("wandb")  # an optional package
        asked = self._config
        self._into = wandb.run or wandb.init(
            project=asked.project, entity=asked.team, group=asked.group
        )

    def __call__(self, ended: StepEnded) -> None:
        """Log one step."""
        self._into.log(dict(tags(ended)), step=ended.samples)


class CsvMonitor(_Monitor):
    """Appends to one file for each number, `Train_Samples_lr.csv` for `Train/Samples/lr`."""

    def open(self) -> None:
        """Make the folder."""
        self._into = self._config.folder.absolute()
        self._into.mkdir(parents=True, exist_ok=True)

    def __call__(self, ended: StepEnded) -> None:
        """Write one step."""
        for name, value in tags(ended).items():
            _append(self._into / f"{name.replace('/', '_')}.csv", name, ended.samples, value)


def _append(path: Path, name: str, samples: int | None, value: float) -> None:
    with open_to_append(path) as file:
        rows = csv.writer(file)
        if file.tell() == 0:  # a run that is resumed goes on in its file
            rows.writerow(["step", name.rpartition("/")[2]])
        rows.writerow([samples, value])
