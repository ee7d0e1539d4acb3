"""Write the numbers of steps to what a configuration asks for: TensorBoard, Weights & Biases, CSV files.

Sections and folders are DeepSpeed's, and so are the names `Train/Samples/...`, over the number of samples.
Beside them stand all metrics of a step under `torchloom/`. Rank 0 writes; where it cannot, it says so once.
"""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

from torchloom.config import MonitorsConfig
from torchloom.events import StepEnded
from torchloom.files import open_to_append
from torchloom.loop.trackers import Tracker, tags


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
