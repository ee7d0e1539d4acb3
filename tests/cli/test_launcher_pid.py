"""A worker ends with the launcher that started it, whatever an earlier launcher left in the environment."""

from __future__ import annotations

import os
import subprocess
import sys

from support.commands import python
from torchloom import envs

WORKER = """
import os, subprocess, sys
from torchloom import envs
from torchloom.cli.processes import begin_worker

begin_worker()
print("began", flush=True)
if len(sys.argv) > 1:
    own = envs.child_environment({"TORCHELASTIC_RUN_ID": "of another torchrun"})
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]], env=own).returncode)
"""


def test_ranks_that_a_worker_starts_are_not_the_launchers() -> None:
    own = envs.child_environment({envs.LAUNCHER_PID: str(os.getpid())})
    done = subprocess.run(
        [sys.executable, "-c", WORKER, WORKER], env=own, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "began\nbegan\n"), done.stderr


def test_a_worker_whose_launcher_is_gone_ends() -> None:
    own = envs.child_environment({envs.LAUNCHER_PID: str(2**22)})
    done = subprocess.run(
        [sys.executable, "-c", WORKER], env=own, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (137, "")


def test_a_launcher_leaves_nothing_behind(monkeypatch) -> None:
    monkeypatch.delenv(envs.LAUNCHER_PID, raising=False)
    with envs.value_within(envs.LAUNCHER_PID, "1"):
        with envs.value_within(envs.LAUNCHER_PID, "2"):
            assert envs.launcher_pid() == 2
        assert envs.launcher_pid() == 1
    assert envs.LAUNCHER_PID not in os.environ


def test_a_command_ends_without_a_last_collection() -> None:
    code = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 0));"
        "sys.argv = ['torchloom', '--help']; from torchloom.cli import main; main()"
    )
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "True", done.stderr
