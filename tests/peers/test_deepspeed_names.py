"""Each name of the map of DeepSpeed's names stands for something that exists."""

from __future__ import annotations

import importlib
import sys

import pytest

from peers import package
from peers.deepspeed_names import MODULES, NAMES
from peers.missing import NoCounterpartError


def test_each_name_of_the_map_exists() -> None:
    assert all(package.look_up(target) is not None for target in NAMES.values())
    assert all(importlib.import_module(each) for each in MODULES.values())


def test_other_names_can_be_imported_and_say_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    package.install()
    from deepspeed.comm import get_rank  # noqa: F401
    from deepspeed.runtime.lr_schedules import WARMUP_MIN_LR, WarmupLR
    from deepspeed.runtime.pipe.module import PipelineModule

    assert WARMUP_MIN_LR == "warmup_min_lr" and WarmupLR.__name__ == "WarmupLR"
    assert not isinstance(WarmupLR, PipelineModule)
    with pytest.raises(
        NoCounterpartError, match=r"deepspeed\.runtime\.pipe\.module\.PipelineModule"
    ):
        PipelineModule()
