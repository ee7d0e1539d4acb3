"""The training program behind `torchloom train`: a decoder on text, on one host or many.

`run` is what each rank calls. The command `torchloom train` turns its options into `TrainOptions` and
starts the ranks; your own script, started by torchrun or Slurm, may call `run` as well.

options     what a run is asked for, checked before any process starts; the run's folder
loop        the run on each rank: model, engine, steps, evaluation, checkpoints
corpus      text with a held-out part, cut into samples
model task  the built-in decoder; the loss of a model, and Hugging Face folders
interrupts  signals, full memory and lost ranks
metrics     what is recorded, shown and summed up
"""

from __future__ import annotations

import sys
from typing import TextIO

from torchloom.recipes.train.options import PRESET_NAMES, TrainOptions

__all__ = ["PRESET_NAMES", "TrainOptions", "run"]


def run(options: TrainOptions, *, rank: int = 0, output: TextIO | None = None) -> None:
    """Train as one of the ranks that a launcher started; rank 0 writes the run's folder.

    Args:
        options: what to train, on what and for how long; equal on every rank.
        rank: this rank, for messages before the process group exists.
        output: where rank 0 shows progress and the summary; None: stdout.

    Raises:
        TorchloomError: the input is wrong, or the run cannot continue; the same on every rank.

    Example:
        >>> run(TrainOptions(steps=20, out="runs/first"))  # doctest: +SKIP
    """
    from torchloom.recipes.train.loop import run_worker  # imports torch

    run_worker(options, rank=rank, output=sys.stdout if output is None else output)
