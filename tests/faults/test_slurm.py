"""Tasks of Slurm are ranks: what is read, what has to be set, and what preemption does to `torchloom train`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.ports import free_port
from torchloom import envs
from torchloom.errors import ConfigError

ROOT = Path(__file__).parents[2]
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


class Tasks:
    """Two processes with the variables of a Slurm job."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        port = free_port()
        inherited = {name: value for name, value in envs.environment().items() if name not in RANKS}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, *argv],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**inherited, **place, **task(number)},
            )
            for number in range(2)
        ]

    def end(self) -> list[str]:
        """Wait for both; return what each printed, unless one failed."""
        try:
            texts = [process.communicate(timeout=300)[0] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.communicate()
        assert [process.returncode for process in self.processes] == [0, 0], "\n".join(texts)
        return texts


def test_preemption_saves_and_the_requeued_job_goes_on(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"some text to learn\n" * 2000)
    argv = ["-m", "torchloom", "train", "--no-compile", "--data", str(text), "--log-every", "1"]
    argv += ["--out", str(tmp_path / "out"), "--seq-len", "16"]
    tasks = Tasks([*argv, "--steps", "100000"], tmp_path)
    for line in tasks.processes[0].stdout:
        if "step 3/" in line:
            break
    for each in tasks.processes:
        each.terminate()  # SIGTERM, as scancel and preemption send it to all tasks
    tasks.end()
    latest = (tmp_path / "out" / "checkpoints" / "latest").read_text()
    saved = int(latest.strip().removeprefix("global_step"))
    texts = Tasks([*argv, "--steps", str(saved + 2), "--resume"], tmp_path).end()

    assert f"after step {saved}" in texts[0]
    assert f"step {saved + 2}/" in texts[0]


def test_the_loop_of_the_page_stops_all_ranks_in_one_step(tmp_path):
    page = (ROOT / "docs" / "recipes.md").read_text()
    (program,) = (
        each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "SIGTERM" in each
    )
    say = '    print("step", engine.global_steps, flush=True)\n'
    (tmp_path / "loop.py").write_text(program.replace("    asked =", f"{say}    asked ="))

    def steps_of_a_start() -> tuple[int, list[int]]:
        tasks = Tasks(["loop.py"], tmp_path)
        first = int(
            next(line for line in tasks.processes[0].stdout if line.startswith("step "))[5:]
        )
        tasks.processes[1].terminate()  # one rank alone
        return first, [int(re.findall(r"ends at step (\d+)", text)[0]) for text in tasks.end()]

    first, (one, other) = steps_of_a_start()
    assert (first, one) == (1, other)
    assert steps_of_a_start()[0] == one + 1
