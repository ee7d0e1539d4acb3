"""Configurations: DeepSpeed-shaped JSON is checked and becomes one frozen `Config`."""

from __future__ import annotations

from torchloom.config.findings import Hint, Note, Problem
from torchloom.config.frozen import FrozenMap, thaw, thawed_map
from torchloom.config.load import Checked, check_config, load_config
from torchloom.config.model import (
    AutocastConfig,
    BatchConfig,
    CheckpointConfig,
    CompileOptions,
    Config,
    LossScaleConfig,
    OffloadConfig,
    OptimizerConfig,
    PrecisionConfig,
    SchedulerConfig,
    ZeroConfig,
)
from torchloom.config.monitors import FolderConfig, MonitorsConfig, WandbConfig

__all__ = [
    "AutocastConfig",
    "BatchConfig",
    "Checked",
    "CheckpointConfig",
    "CompileOptions",
    "Config",
    "FolderConfig",
    "FrozenMap",
    "Hint",
    "LossScaleConfig",
    "MonitorsConfig",
    "Note",
    "OffloadConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "Problem",
    "SchedulerConfig",
    "WandbConfig",
    "ZeroConfig",
    "check_config",
    "load_config",
    "thaw",
    "thawed_map",
]
