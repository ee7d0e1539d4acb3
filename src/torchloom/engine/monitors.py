"""The trackers that a configuration asks for: TensorBoard, Weights & Biases, CSV files.

Sections and folders are DeepSpeed's, and so are the names `Train/Samples/...`, over the number of samples.
Beside them stand all metrics of a step under `torchloom/`. Rank 0 writes; where it cannot, it says so once.
"""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

from torchloom.config import FolderConfig, MonitorsConfig, WandbConfig
from torchloom.events import StepEnded
from torchloom.files import open_to_append
from torchloom.loop.trackers import Tracker, tags


def trackers_of(monitors: MonitorsConfig) -> list[Tracker]:
    """Open what a configuration asks for; return a tracker for each section that could be opened."""
    found = []
    if monitors.tensorboard is not None:
        board = TensorBoardMonitor(monitors.tensorboard)
        name = "tensorboard of the config"
        found.append(Tracker(board, name, open=board.open, close=board.close))
    if monitors.wandb is not None:
        wandb = WandbMonitor(monitors.wandb)
        found.append(Tracker(wandb, "wandb of the config", open=wandb.open))
    if monitors.csv is not None:
        files = CsvMonitor(monitors.csv)
        found.append(Tracker(files, "csv_monitor of the config", open=files.open))
    return [tracker for tracker in found if tracker.begin()]


class TensorBoardMonitor:
    """Writes event files; each step can be read at once."""

    def __init__(self, config: FolderConfig) -> None:
        self._folder = config.folder.absolute()
        self._writer: Any = None

    def open(self) -> None:
        """Begin a file of this run."""
        board: Any = importlib.import_module("torch.utils.tensorboard")  # an optional package
        self._writer = board.SummaryWriter(log_dir=str(self._folder))

    def __call__(self, ended: StepEnded) -> None:
        """Write one step."""
        if self._writer is None:
            self.open()
        writer: Any = self._writer
        self._writer = None  # a writer that has failed once fails for good
        for name, value in tags(ended).items():
            writer.add_scalar(name, value, ended.samples)
        writer.flush()
        self._writer = writer

    def close(self) -> None:
        """Write what is held back."""
        if self._writer is not None:
            self._writer.close()


class WandbMonitor:
    """Logs to the program's run, or starts one; wandb ends it with the program."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None

    def open(self) -> None:
        """Find the program's run, or start one."""
        wandb: Any = importlib.import_module("wandb")  # an optional package
        config = self._config
        self._run = wandb.run or wandb.init(
            project=config.project, entity=config.team, group=config.group
        )

    def __call__(self, ended: StepEnded) -> None:
        """Log one step."""
        self._run.log(dict(tags(ended)), step=ended.samples)


class CsvMonitor:
    """Appends to one file for each number, `Train_Samples_lr.csv` for `Train/Samples/lr`."""

    def __init__(self, config: FolderConfig) -> None:
        self._folder = config.folder.absolute()

    def open(self) -> None:
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, ended: StepEnded) -> None:
        """Write one step."""
        for name, value in tags(ended).items():
            _append(self._folder / f"{name.replace('/', '_')}.csv", name, ended.samples, value)


def _append(path: Path, name: str, samples: int | None, value: float) -> None:
    with open_to_append(path) as file:
        rows = csv.writer(file)
        if file.tell() == 0:  # a run that is resumed goes on in its file
            rows.writerow(["step", name.rpartition("/")[2]])
        rows.writerow([samples, value])
