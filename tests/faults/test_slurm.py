"""Tasks of Slurm are ranks: what is read, what has to be set, and what preemption does to `torchloom train`."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from torchloom import envs
from torchloom.errors import ConfigError

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
MEETING = ("MASTER_ADDR", "MASTER_PORT")


def task(number: int, **rest: object) -> dict[str, str]:
    """Return what srun sets for one of two tasks on one host."""
    own = {"SLURM_PROCID": number, "SLURM_LOCALID": number, "SLURM_NTASKS": 2, "SLURM_JOB_ID": 4711}
    return {name: str(value) for name, value in {**own, **rest}.items()}


@pytest.fixture
def srun(monkeypatch):
    """Take the place of one task."""

    def become(number: int, **rest: object) -> None:
        for name in (*RANKS, *MEETING, "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_PER_TASK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in task(number, **rest).items():
            monkeypatch.setenv(name, value)

    return become


def test_tasks_are_ranks(srun):
    srun(1)

    assert envs.launch() == (1, 1, 2)


def test_the_address_to_set_is_told(srun):
    srun(1)

    with pytest.raises(ConfigError, match=r"task 1 of 2 .* MASTER_ADDR") as caught:
        envs.meeting(29500)
    assert 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)' in str(
        caught.value
    )
    srun(1, MASTER_ADDR="node7")
    assert envs.meeting(29500) == ("node7", 29500, False, 0)


@pytest.mark.parametrize(
    ("visible", "per_task", "place"),
    [
        ("0", "1", 0),  # each task sees its own device alone
        ("2,3", "a100:2", 0),
        ("0,1,2,3", "1", 1),  # not bound: all tasks see all devices
        ("0", None, 1),  # too many tasks: an error later, where devices are counted
        (None, "1", 1),
    ],
)
def test_devices_that_are_bound_to_a_task_are_its_own(srun, visible, per_task, place):
    given = {"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_PER_TASK": per_task}
    srun(1, **{name: value for name, value in given.items() if value is not None})

    assert envs.launch().local_rank == place


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"some text to learn\n" * 2000)
    return path


def test_preemption_saves_and_the_requeued_job_goes_on(tmp_path, text):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "torchloom", "train", "--no-compile", "--data", str(text)]
    argv += ["--out", str(tmp_path / "out"), "--seq-len", "16", "--log-every", "1"]
    inherited = {name: value for name, value in envs.environment().items() if name not in RANKS}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}

    def start(stack: ExitStack, *options: object) -> list[subprocess.Popen[str]]:
        return [
            stack.enter_context(
                subprocess.Popen(
                    [*argv, *map(str, options)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**inherited, **place, **task(number)},
                )
            )
            for number in range(2)
        ]

    with ExitStack() as stack:
        tasks = start(stack, "--steps", 100_000)
        said = []
        for line in tasks[0].stdout:
            said.append(line)
            if "step 3/" in line:
                break
        for each in tasks:
            each.terminate()  # as scancel and preemption do, with SIGTERM
        said += [each.communicate(timeout=60)[0] for each in tasks]
    assert [each.returncode for each in tasks] == [0, 0], "".join(said)
    latest = (tmp_path / "out" / "checkpoints" / "latest").read_text()
    saved = int(latest.strip().removeprefix("global_step"))
    with ExitStack() as stack:
        tasks = start(stack, "--steps", saved + 2, "--resume")
        texts = [each.communicate(timeout=60)[0] for each in tasks]
    assert [each.returncode for each in tasks] == [0, 0], "".join(texts)
    assert f"after step {saved}" in texts[0]
    assert f"step {saved + 2}/" in texts[0]
