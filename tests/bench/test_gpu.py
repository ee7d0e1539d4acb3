"""The benchmark for one GPU runs where there is none, with a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "bench" / "gpu" / "run.py"


@pytest.mark.exhaustive
def test_a_small_model_without_a_gpu(tmp_path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(GPU), "--device", "cpu", "--tiny", "--backend", "aot_eager"]
    arms = "loom,loom-states,loom-budget-offload,fsdp2-checkpoint,fsdp2-cpu-offload"
    done = subprocess.run(
        [*command, "--steps", "2", "--warmup", "1", "--arms", arms, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    assert [each["arm"] for each in record["arms"]] == arms.split(",")
    assert not any("error" in each for each in record["arms"]), record["arms"]
    assert record["verdicts"] == ["ok   loom-states: the same to the bit as loom"]
    assert record["calibration"]["host_triad_bytes_per_s"] > 0
