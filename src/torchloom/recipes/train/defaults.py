"""The settings of a run without `--config`, in the same shape as a config file."""

from __future__ import annotations

import math
from typing import Any

DEFAULT_MICRO_BATCH = 4


def default_config(*, steps: int, micro_batch: int | None) -> dict[str, Any]:
    """Return ZeRO-3 with AdamW in fp32; 10 % of the steps warm up, then the rate follows a cosine.

    The learning rate suits the small presets; use a config for a large model.

    Args:
        steps: optimizer steps of the whole run, for the schedule.
        micro_batch: samples per rank and micro-step; None: 4.
    """
    return {
        "train_micro_batch_size_per_gpu": micro_batch or DEFAULT_MICRO_BATCH,
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
                "total_num_steps": steps,
                "warmup_num_steps": max(1, steps // 10),
                "warmup_min_ratio": 0.0,
                "cos_min_ratio": 0.1,
            },
        },
    }
