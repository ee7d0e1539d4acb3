"""Measuring leaves the environment as it was."""

from __future__ import annotations

import os

import pytest
import torch

from torchloom.memory import measure_peak


@pytest.mark.parametrize("level", [None, "3"])
def test_the_level_of_the_profilers_messages_is_put_back(level, monkeypatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("KINETO_LOG_LEVEL", level)
    assert measure_peak(lambda: torch.ones(10).sum()).peak_bytes == 44
    assert os.environ.get("KINETO_LOG_LEVEL") == level
