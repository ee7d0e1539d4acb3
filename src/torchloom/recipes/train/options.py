"""The options of a training run, and the config of a run without `--config`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

PRESET_NAMES = ("llama-tiny", "llama-34m")
"""The built-in models; `--model` also accepts a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """The options of one run; `None` means "as the config or the default says"."""

    model: str = "llama-tiny"
    """A built-in preset or a local folder in Hugging Face format."""
    config: str | None = None
    """A DeepSpeed-shaped JSON file."""
    data: str | None = None
    """A text file or a folder of them; the standard library's sources by default."""
    out: str | None = None
    """Where metrics, charts and checkpoints go; a fresh folder under `runs/` by default."""
    nproc: int = 2
    """Workers started on this host; ignored when a launcher started this process."""
    steps: int = 120
    """Optimizer steps of the whole run, those before a resume included."""
    resume: bool = False
    """Continue from the newest checkpoint in `out`."""
    compile: bool = True
    """Weave and compile the step; without it the engine runs eagerly sharded."""
    seed: int = 0
    """Decides initial weights, order of samples and dropout."""
    seq_len: int = 256
    """Tokens per sample."""
    micro_batch: int | None = None
    """Samples per rank and micro-step."""
    eval_every: int = 20
    """Steps between two evaluations of the held-out text."""
    save_every: int | None = None
    """Steps between two checkpoints; by default the end is saved, and one on the way by the clock."""
    save_minutes: float = 10.0
    """Minutes after which the one checkpoint on the way is replaced, without `save_every`; 0 saves none."""
    keep_last: int | None = None
    """How many checkpoints stay; all by default."""
    log_every: int = 10
    """Steps between two printed lines where there is no terminal for a progress bar."""
    tensorboard: bool = False
    """Also write TensorBoard events to `out/tensorboard`."""
    report: bool = False
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
