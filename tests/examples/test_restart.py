"""A rank that is killed under `torchrun --max-restarts`: the ranks start again and end with the same losses, as one rank does."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchloom import envs

PROGRAM = Path(__file__).parents[2] / "examples" / "train_restart.py"


@contextmanager
def torchrun(*arguments: str | Path, num_ranks: int = 2) -> Iterator[subprocess.Popen[str]]:
    """Start the example; end all that is left of it afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", "2"]
    process = subprocess.Popen(
        [*command, "--monitor-interval", "0.1", str(PROGRAM), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=envs.child_environment({"OMP_NUM_THREADS": "1"}),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def losses_in(lines: list[str]) -> dict[int, float]:
    """Return the last loss that was printed for each step."""
    found = re.findall(r"^step (\d+) loss (\S+)$", "\n".join(lines), re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def starts_in(lines: list[str]) -> list[tuple[int, int, int]]:
    """Return rank, process and first step of each start."""
    text = "\n".join(lines)
    found = re.findall(r"rank (\d) is process (\d+), at step (\d+)", text)
    return [(int(rank), int(pid), int(step)) for rank, pid, step in found]


def test_killed_ranks_cost_only_steps_since_the_last_checkpoint(tmp_path: Path):
    options = ["--steps", "24", "--save-every", "4"]
    with torchrun(*options, "--out", tmp_path / "whole") as process:
        expected = losses_in((process.communicate(timeout=300)[0]).splitlines())
    assert process.returncode == 0
    lines: list[str] = []
    kills = [(6, 1), (15, 0)]  # after this step, this rank; once in each of the first two starts
    with torchrun(*options, "--out", tmp_path / "killed") as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if kills and f"step {kills[0][0]} loss" in line:
                _, rank = kills.pop(0)
                os.kill(
                    [pid for each, pid, _ in starts_in(lines) if each == rank][-1], signal.SIGKILL
                )
        process.wait(timeout=300)

    assert process.returncode == 0, "\n".join(lines)
    assert losses_in(lines) == expected
    assert len(expected) == 24
    firsts = [step for rank, _, step in starts_in(lines) if rank == 0]
    assert len(firsts) == 3
    assert firsts[0] == 0
    # The newest checkpoint when the rank died, or one more where the other got as far.
    assert all(step > 0 and step % 4 == 0 for step in firsts[1:])

    shutil.rmtree(tmp_path / "killed/global_step24")
    (tmp_path / "killed/latest").write_text("global_step20")
    with torchrun(*options, "--out", tmp_path / "killed", num_ranks=1) as process:
        alone = losses_in((process.communicate(timeout=300)[0]).splitlines())
    assert alone == pytest.approx({step: expected[step] for step in range(21, 25)}, rel=1e-5)
