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
from collections.abc import Callable, Generator, Mapping
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


Receiver = Generator[None, StepEnded, None]
"""Is sent each step; closed when the engine is destroyed, to write what it holds back. One that has raised is made anew."""


@dataclass
class Tracker:
    """One receiver of steps."""

    open: Callable[[], Receiver]
    """Makes it."""
    name: str
    """For the warning."""
    every: int = 1
    _receiver: Receiver | None = field(default=None, init=False)
    _has_failed: bool = field(default=False, init=False)
    _failed_at: int = field(default=0, init=False)
    _pause: int = field(default=0, init=False)
    """Steps from the last failure to the next call; 0 after a success."""

    def is_due(self, step: int) -> bool:
        """Say whether it gets this step."""
        return step % self.every == 0 and step >= self._failed_at + self._pause

    def begin(self) -> None:
        """Let it open what it writes to; where that fails it is tried again at a later step."""
        self._do(self._opened, 0)

    def take(self, ended: StepEnded) -> None:
        """Hand a step over; the first failure is logged as a warning."""
        self._do(lambda: self._opened().send(ended), ended.step)

    def end(self, step: int) -> None:
        """Let it write what it holds back."""
        if self._receiver is not None:
            self._do(self._receiver.close, step)

    def _opened(self) -> Receiver:
        if self._receiver is None:
            made = self.open()
            next(made)
            self._receiver = made
        return self._receiver

    def _do(self, call: Callable[[], object], step: int) -> None:
        try:
            call()
            self._pause = 0
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
            self._has_failed, self._receiver = True, None
            self._failed_at, self._pause = step, min(2 * self._pause or 1, MAX_PAUSE)


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

    def calling() -> Receiver:
        while True:
            ended = yield
            log(ended.metrics(prefix), ended.step)

    return Tracker(calling, f"{name} of log_to", every)


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
    """Open what a configuration asks for; return a tracker for each section."""
    found: list[Tracker] = []
    if monitors.tensorboard is not None:
        folder = monitors.tensorboard.folder.absolute()
        found.append(Tracker(lambda: _tensorboard(folder), "tensorboard of the config"))
    if (wandb := monitors.wandb) is not None:
        found.append(Tracker(lambda: _wandb(wandb), "wandb of the config"))
    if monitors.csv is not None:
        into = monitors.csv.folder.absolute()
        found.append(Tracker(lambda: _csv(into), "csv_monitor of the config"))
    for each in found:
        each.begin()
    return found


def _tensorboard(folder: Path) -> Receiver:
    """Write an event file; each step can be read at once."""
    board: Any = importlib.import_module("torch.utils.tensorboard")  # an optional package
    writer = board.SummaryWriter(log_dir=str(folder))
    while True:
        try:
            ended = yield
        except GeneratorExit:  # not after a failure: a writer that has failed once fails for good
            writer.close()
            return
        for name, value in tags(ended).items():
            writer.add_scalar(name, value, ended.samples)
        writer.flush()


def _wandb(config: Any) -> Receiver:
    """Log to the program's run, or to one that begins here; wandb ends it with the program."""
    wandb: Any = importlib.import_module("wandb")  # an optional package
    run = wandb.run or wandb.init(project=config.project, entity=config.team, group=config.group)
    while True:
        ended = yield
        run.log(dict(tags(ended)), step=ended.samples)


def _csv(folder: Path) -> Receiver:
    """Append to one file for each number, `Train_Samples_lr.csv` for `Train/Samples/lr`."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        ended = yield
        for name, value in tags(ended).items():
            _append(folder / f"{name.replace('/', '_')}.csv", name, ended.samples, value)


def _append(path: Path, name: str, samples: int | None, value: float) -> None:
    with open_to_append(path) as file:
        rows = csv.writer(file)
        if file.tell() == 0:  # a run that is resumed goes on in its file
            rows.writerow(["step", name.rpartition("/")[2]])
        rows.writerow([samples, value])
