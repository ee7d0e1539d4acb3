"""The benchmark of planning runs, keeps its promise on a shallow model, and writes no paths."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_a_shallow_decoder(tmp_path) -> None:
    out = tmp_path / "plan.json"
    command = [sys.executable, str(BENCH / "plan.py"), "--layers", "2", "--repeats", "1"]
    done = subprocess.run(
        [*command, "--seq-len", "128", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "kept" in done.stdout.splitlines()[-1]
    record = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    peaks = [point["peak_bytes"] for point in record["points"]]
    assert peaks == sorted(peaks)
    assert all(point["peak_bytes"] <= point["budget_bytes"] for point in record["points"])
    assert all(0 <= point["bound_us"] <= point["extra_us"] for point in record["points"])
