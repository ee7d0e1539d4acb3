"""All parts of the benchmark for one GPU run where there is none, with a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "bench" / "gpu" / "run.py"


@pytest.mark.exhaustive
def test_every_part_without_a_gpu(tmp_path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(GPU), "--device", "cpu", "--quick", "--backend", "aot_eager"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    record = json.loads(out.read_text())
    assert (done.returncode, record["failed"]) == (0, {}), done.stderr
    assert str(tmp_path) not in out.read_text()
    parts = record["parts"]
    assert list(parts) == list(record["seconds"])
    assert parts["calibrate"]["host_triad_bytes_per_s"] > 0
    assert parts["budget"]["predicted_peak_bytes"] <= parts["budget"]["budget"]
    assert parts["budget"]["budget"] < parts["plan"]["predicted_peak_bytes"]
    # One rank of ours and FSDP2's of one rank compute the same; the plain model casts elsewhere.
    assert parts["peers"]["loom"]["weights"] == parts["peers"]["fsdp2"]["weights"]
    assert all(each["step_s"] > 0 for each in parts["peers"].values())
    assert set(parts["serving"]["batches"]) == {"1", "8", "64"}
    assert all(abs(parts[name]["peak_off"]) < 0.02 for name in ("plan", "budget"))
    assert all(each["is_equal"] for each in parts["offloads"].values())
    assert parts["ranks"]["losses_off"] <= 1e-3


@pytest.mark.exhaustive
def test_a_part_that_fails_is_told_and_the_next_goes_on(tmp_path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(GPU), "--device", "cpu", "--quick", "--parts", "ranks,calibrate"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    record = json.loads(out.read_text())
    assert done.returncode == 1
    assert list(record["failed"]) == ["ranks"]
    assert list(record["parts"]) == ["calibrate"]
