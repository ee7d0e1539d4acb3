"""Two real ranks: a run that is interrupted and resumed equals one that was left alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from support.commands import environment


def start(data, out, *argv):
    options = ["--data", data, "--out", out, "--steps", "16", "--seq-len", "32", "--log-every", "1"]
    options += ["--micro-batch", "2"]
    return subprocess.Popen(
        [sys.executable, "-m", "torchloom", "train", "--no-compile", *map(str, (*options, *argv))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )


def finish(process):
    """Return what a run still printed; fail with it if the run failed."""
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return output


def losses(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if row["kind"] == "step"]


@pytest.mark.slow
def test_an_interrupted_run_saves_and_resumes_exactly(tmp_path):
    data = tmp_path / "text.txt"
    data.write_bytes(b"".join(f"{i * i} is the square of {i}\n".encode() for i in range(4000)))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finish(start(data, whole))

    interrupted = start(data, parts)
    for line in interrupted.stdout:
        if line.startswith("step 5/16"):
            interrupted.send_signal(signal.SIGINT)
            break
    assert "stopped by SIGINT" in finish(interrupted)
    done = json.loads((parts / "summary.json").read_text())
    assert 5 <= done["steps"] < 16
    assert done["stopped_by"] == "SIGINT"

    finish(start(data, parts, "--resume"))
    assert losses(parts) == losses(whole)
    assert losses(whole)[-1][1] < losses(whole)[0][1] - 1
    for name in ("loss.svg", "step_time.svg", "throughput.svg", "memory.svg"):
        assert (parts / name).read_text().startswith("<svg")
