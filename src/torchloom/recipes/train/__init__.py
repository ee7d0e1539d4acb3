"""The training program behind `torchloom train`: a decoder on text, on one host or many.

`run` is what each rank calls. The command `torchloom train` turns its options into `TrainOptions` and
starts the ranks; your own script, started by torchrun or Slurm, may call `run` as well.

options    what a run is asked for
preflight  checks before any process starts
worker     what each rank runs: builds model, data and engine, calls the loop, reports
loop       the steps themselves; takes the engine as an argument
model hf task   the built-in decoder, Hugging Face folders, and the loss of either
corpus stream   text with a held-out split; the deterministic order of samples
defaults outdir   the config of a run without --config; the run's folder
stop       what signals ask of a rank
failing    full memory and lost ranks as one sentence
metrics flops progress summary watching   what is recorded and shown
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
    from torchloom.recipes.train.worker import run_worker  # imports torch

    run_worker(options, rank=rank, output=sys.stdout if output is None else output)
