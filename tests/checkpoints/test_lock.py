"""One run per folder, and several engines of one run in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

from support.checkpoints import leftovers, outcome
from support.ranks import run_ranks
from support.runs import make_engine
from torchloom.checkpoints import write as writing
from torchloom.checkpoints.lock import FOLDERS

OTHER = """
import sys, time
from pathlib import Path
from torchloom.checkpoints.lock import FOLDERS
FOLDERS.take(Path(sys.argv[1]), 1)
print("held", flush=True)
time.sleep(60)
"""


def wait_for_the_end_of(pid: int) -> None:
    """Wait until the kernel has taken back what a killed process held, while its parent has not asked for it."""
    state = Path(f"/proc/{pid}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX":
        time.sleep(0.02)


def test_two_runs_in_one_folder(tmp_path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"

        def fn(rank):
            engine, _ = make_engine(3)
            text = outcome(lambda: engine.save_checkpoint(tmp_path))
            if rank == 0:
                os.kill(other.pid, signal.SIGKILL)
                wait_for_the_end_of(other.pid)
            return text, outcome(lambda: engine.save_checkpoint(tmp_path))

        for refused, taken_over in run_ranks(2, fn):
            assert "another run writes" in refused
            assert str(other.pid) in refused
            assert taken_over == "done"


def test_the_lock_is_released_by_destroy(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        engine.save_checkpoint(tmp_path)
        if rank == 0:
            code = f"from pathlib import Path; from torchloom.checkpoints.lock import FOLDERS; FOLDERS.take(Path({str(tmp_path)!r}), 1)"
            held = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert "another run writes" in held.stderr
            engine.destroy()
            subprocess.run([sys.executable, "-c", code], check=True)

    run_ranks(1, fn)


def is_free(root) -> bool:
    """Say whether another process may write into a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12+: fork with threads
        pid = os.fork()
    if pid == 0:
        try:
            text = outcome(lambda: FOLDERS.take(root, 1))
            os._exit(0 if text == "done" else 1 if "another run writes" in text else 2)
        finally:
            os._exit(3)
    code = os.WEXITSTATUS(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 0


def test_the_lock_is_held_until_the_last_of_several_lets_go(tmp_path) -> None:
    FOLDERS.take(tmp_path / ".", "a")
    FOLDERS.take(tmp_path, "b")
    FOLDERS.release("a")
    FOLDERS.release("a")
    shutil.copytree(tmp_path, tmp_path.with_name(tmp_path.name + "-copy"))  # reads the lock file
    assert not is_free(tmp_path)
    (tmp_path / ".torchloom.lock").unlink()  # someone cleaned up
    FOLDERS.take(tmp_path, "b")
    assert not is_free(tmp_path)
    FOLDERS.release("b")
    assert is_free(tmp_path)


FORKS = """
import os, sys, time
from pathlib import Path
from torchloom.checkpoints.lock import FOLDERS
FOLDERS.take(Path(sys.argv[1]), 1)
if os.fork() == 0:
    FOLDERS.release(1)
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_worker_that_outlives_its_run_holds_nothing(tmp_path) -> None:
    """As those of a data loader, for some seconds."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        try:
            assert not is_free(tmp_path)
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
            assert is_free(tmp_path)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_two_engines_save_at_the_same_time(tmp_path) -> None:
    """As generator and discriminator of one run."""

    def fn(rank):
        started, may_end = threading.Event(), threading.Event()
        real = writing._write_own

        def held(state, path, *rest):
            if path.name.endswith("gen"):
                started.set()
                assert may_end.wait(60)
            return real(state, path, *rest)

        writing._write_own = held
        generator, discriminator = make_engine(3)[0], make_engine(3, seed=1)[0]
        generator.save_checkpoint(tmp_path, "gen", async_save=True)
        assert started.wait(60)
        second = outcome(lambda: discriminator.save_checkpoint(tmp_path, "dis"))
        may_end.set()
        first = outcome(generator.wait_for_checkpoint)
        discriminator.destroy()
        is_held = rank != 0 or not is_free(tmp_path)
        loaded = [
            outcome(lambda t=t: generator.load_checkpoint(tmp_path, t)) for t in ("gen", "dis")
        ]
        return first, second, is_held, *loaded

    assert run_ranks(2, fn) == [("done", "done", True, "done", "done")] * 2
    assert leftovers(tmp_path) == []
