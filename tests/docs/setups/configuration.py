"""A configuration as a file."""

from __future__ import annotations

import json
from pathlib import Path

tree = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4}
Path("ds_config.json").write_text(
    json.dumps({**tree, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
)
