"""The soak itself, with few steps and kills, and proof that it notices what it looks for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOAK = Path(__file__).parents[2] / "bench" / "soak"
sys.path.insert(0, str(SOAK))

from _compare import differences
from _slopes import MAX_RSS_KIB_PER_1000, slope, within_processes

sys.path.remove(str(SOAK))


@pytest.mark.exhaustive
def test_two_kills_and_the_same_weights(tmp_path) -> None:
    out = tmp_path / "soak.json"
    arguments = [
        "--steps",
        "60",
        "--kills",
        "2",
        "--save-every",
        "10",
        "--parts",
        "kills",
        "--backend",
    ]
    done = subprocess.run(
        [sys.executable, str(SOAK / "run.py"), *arguments, "", "--out", out, "--folder", tmp_path],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["kills"]
    assert found["different"] == []
    assert len(found["killed"]) == 2
    assert found["starts"] == 3
    assert found["repeated_steps"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {"soak.json"}


def _end(folder: Path, weight: torch.Tensor) -> Path:
    folder.mkdir()
    torch.save({"weights": {"a": weight}, "schedule": "1"}, folder / "final-0.pt")
    return folder


def test_one_changed_bit_is_reported(tmp_path) -> None:
    weight = torch.linspace(-1, 1, 9)
    next_to_it = weight.clone()
    next_to_it[4] = torch.nextafter(weight[4], torch.tensor(2.0))
    negative_zero = weight.clone()
    negative_zero[4] = -0.0
    one = _end(tmp_path / "one", weight)
    assert differences(one, _end(tmp_path / "same", weight.clone())) == []
    assert differences(one, _end(tmp_path / "next", next_to_it)) == [
        "final-0.pt weights a: other bits"
    ]
    assert differences(one, _end(tmp_path / "zero", negative_zero)) != []
    assert differences(one, _end(tmp_path / "half", weight.half())) != []


def _life(grows: float = 0, threads: int = 0, descriptors: int = 0) -> list[dict[str, int]]:
    return [
        {
            "rank": 0,
            "pid": 7,
            "step": step,
            "rss_kib": int(400_000 + grows * step),
            "threads": 6 + threads * (step > 400),
            "descriptors": 18 + descriptors * (step > 400),
        }
        for step in range(0, 1000, 10)
    ]


def test_growth_within_a_process_is_noticed() -> None:
    level = within_processes(_life())
    assert level["num_processes"] == 1
    assert level["rss_kib_per_1000_steps"] == 0
    assert level["more_threads"] == level["more_descriptors"] == 0
    assert within_processes(_life(grows=9.0))["rss_kib_per_1000_steps"] > MAX_RSS_KIB_PER_1000
    assert within_processes(_life(threads=1))["more_threads"] == 1
    assert within_processes(_life(descriptors=2))["more_descriptors"] == 2
    assert slope([(0, 1.0), (2, 5.0)]) == 2.0
