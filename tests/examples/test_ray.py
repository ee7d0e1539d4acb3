"""Ray Train: a worker that is killed, and a second start that goes on from the checkpoint that Ray kept."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchloom import envs

pytest.importorskip("ray.train", reason="Ray Train is not installed")

PROGRAM = Path(__file__).parents[2] / "examples" / "train_ray.py"
DIES = """
def batch(step, rank, plain=batch):
    mark = Path({mark!r})
    if step == 8 and rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)
    return plain(step, rank)


if __name__ == "__main__":
"""


def test_a_killed_worker_costs_only_steps_since_the_last_checkpoint(tmp_path: Path):
    start = 'if __name__ == "__main__":\n'
    program = tmp_path / "train_ray.py"
    mark = str(tmp_path / "killed")
    program.write_text(PROGRAM.read_text().replace(start, DIES.format(mark=mark).lstrip("\n")))
    options = ["--steps", "12", "--save-every", "3", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, str(program), *options, "--storage", str(tmp_path / "ray")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=envs.child_environment({"RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}),
    )
    text = done.stdout + done.stderr

    assert done.returncode == 0, text
    assert "ended with {'step': 12" in text
    assert (tmp_path / "killed").exists()
    # Ray prints each line of a worker twice.
    starts = re.findall(r"rank 0 is process (\d+), at step (\d+)", text)
    firsts = sorted({int(step) for _, step in starts})
    assert len(set(starts)) == 2, text
    assert firsts in ([0, 3], [0, 6])  # 6 may not have been kept yet when the worker died
    losses: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step (\d+) loss ([\d.e-]+)", text):
        losses.setdefault(int(step), set()).add(loss)
    assert sorted(losses) == [*range(1, 13)]
    assert all(len(told) == 1 for told in losses.values()), "a repeated step came out differently"
    assert list((tmp_path / "ray" / "torchloom").glob("checkpoint_*/global_step12/manifest.json"))
