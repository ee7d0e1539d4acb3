"""The options of a training run, and the config of a run without `--config`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

PRESET_NAMES = ("llama-tiny", "llama-34m")
"""The built-in models; `--model` also accepts a folder."""


def _option(default: Any, said: str, **more: object) -> Any:
    """Return a field of a default and what the command line says of it: text, bounds, how the default is shown."""
    return field(default=default, metadata={"help": said, **more})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """The options of one run; `None` means "as the config or the default says"."""

    model: str = _option("llama-tiny", "llama-tiny, llama-34m, or a local Hugging Face folder.")
    """A built-in preset or a local folder in Hugging Face format."""
    config: str | None = _option(
        None, "JSON file in DeepSpeed's format.", show_default="ZeRO-3, AdamW"
    )
    """A DeepSpeed-shaped JSON file."""
    data: str | None = _option(
        None,
        "File or folder to train on; any bytes are accepted.",
        show_default="Python's standard library",
    )
    """A text file or a folder of them; the standard library's sources by default."""
    out: str | None = _option(
        None, "Folder for metrics, charts and checkpoints.", show_default="runs/..."
    )
    """Where metrics, charts and checkpoints go; a fresh folder under `runs/` by default."""
    nproc: int = _option(
        2, "Workers to start on this host; not used under torchrun or Slurm.", min=1
    )
    """Workers started on this host; ignored when a launcher started this process."""
    steps: int = _option(120, "Optimizer steps of the whole run.", min=1)
    """Optimizer steps of the whole run, those before a resume included."""
    resume: bool = _option(False, "Continue from the newest checkpoint in --out.")
    """Continue from the newest checkpoint in `out`."""
    compile: bool = _option(True, "Weave and compile the step.")
    """Weave and compile the step; without it the engine runs eagerly sharded."""
    seed: int = _option(0, "Seed of weights, order of samples and dropout.", min=0, max=2**20)
    """Decides initial weights, order of samples and dropout."""
    seq_len: int = _option(256, "Tokens per sample.", min=2)
    """Tokens per sample."""
    micro_batch: int | None = _option(
        None, "Samples per rank and micro-step.", min=1, show_default="4"
    )
    """Samples per rank and micro-step."""
    eval_every: int = _option(20, "Steps between evaluations on held-out text.", min=1)
    """Steps between two evaluations of the held-out text."""
    save_every: int | None = _option(
        None, "Steps between checkpoints.", min=1, show_default="at the end"
    )
    """Steps between two checkpoints; by default the end is saved, and one on the way by the clock."""
    save_minutes: float = _option(
        10.0, "Minutes until the checkpoint on the way is saved anew, without --save-every.", min=0
    )
    """Minutes after which the one checkpoint on the way is replaced, without `save_every`; 0 saves none."""
    keep_last: int | None = _option(
        None, "Number of newest checkpoints to keep.", min=1, show_default="all"
    )
    """How many checkpoints stay; all by default."""
    log_every: int = _option(10, "Steps between printed lines if there is no terminal.", min=1)
    """Steps between two printed lines where there is no terminal for a progress bar."""
    tensorboard: bool = _option(False, "Also write TensorBoard events.")
    """Also write TensorBoard events to `out/tensorboard`."""
    report: bool = _option(
        False, "Write report.html: graphs, guards and a timeline of the first steps."
    )
    """Also watch the compile and the first steps, and leave `report.html` in `out`."""


def default_config(options: TrainOptions) -> dict[str, Any]:
    """Return ZeRO-3 with AdamW in fp32; 10 % of the steps warm up, then the rate follows a cosine.

    The learning rate suits the small presets; use a config for a large model.
    """
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch or 4,
        # With the usual threshold of 100 000 elements, a small model would not be sharded at all.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10_000},
        "gradient_clipping": 1.0,
        "steps_per_print": math.inf,  # the command shows its own progress
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": options.steps,
                "warmup_num_steps": max(1, options.steps // 10),
                "warmup_min_ratio": 0.0,
                "cos_min_ratio": 0.1,
            },
        },
    }
