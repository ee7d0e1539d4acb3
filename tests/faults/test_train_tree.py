"""`torchloom train` under signals, kills and full memory: what is said, and what is left behind."""

from __future__ import annotations

import os
import pty
import resource
import signal
import sys
import time

import pytest

from support.trees import Tree
from torchloom import envs

TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend",
    "c10d", "--rdzv-endpoint", "127.0.0.1:0",
)  # fmt: skip


@pytest.fixture
def grow(tmp_path):
    """Start trees, and end those that a failed test leaves."""
    trees = []

    def start(*options, **rest) -> Tree:
        folder = tmp_path / str(len(trees))
        folder.mkdir()
        trees.append(Tree(folder, *options, **rest))
        return trees[-1]

    yield start
    for tree in trees:
        tree.kill()


@pytest.fixture(autouse=True)
def _hangups_are_heard():
    """Tests that `nohup` has started ignore hangups, and so would the runs that they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_workers_end_when_the_launcher_is_killed(grow) -> None:
    tree = grow("--steps", 100_000)
    tree.await_line("step 2/")
    assert len(tree.workers()) == 2
    tree.process.kill()
    tree.assert_gone()


def test_workers_end_when_torchrun_is_killed(grow) -> None:
    tree = grow("--steps", 100_000, head=(*TORCHRUN, "--log-dir", os.devnull))
    tree.await_line("step 2/")
    tree.process.kill()
    tree.assert_gone()


def test_a_killed_worker_is_named(grow) -> None:
    tree = grow("--steps", 100_000)
    tree.await_line("step 2/")
    os.kill(tree.workers()[1], signal.SIGKILL)
    assert tree.end() == 1
    assert "torchloom train: rank 1 was killed by SIGKILL" in tree.text
    assert "Traceback" not in tree.text
    tree.assert_gone()


def test_hangup_saves_and_goes_on_and_old_checkpoints_go(grow) -> None:
    tree = grow("--steps", 100_000, "--save-every", 10, "--keep-last", 2)
    seen = tree.await_line("step 2/")
    for _ in range(6):  # the signal may come in the very step that saves anyway
        tree.process.send_signal(signal.SIGHUP)
        seen = tree.await_line("saved ", after=seen)
        if not tree.lines[seen - 1].endswith("0"):
            break
    else:
        raise AssertionError("no save is of the signal")
    for _ in range(2):
        seen = tree.await_line("saved ", after=seen)
    seen = tree.await_line("step ", after=seen)
    tree.process.send_signal(signal.SIGTERM)
    assert tree.end() == 0, tree.text
    assert "stopped by SIGTERM" in tree.text
    kept = sorted(path.name for path in (tree.out / "checkpoints").glob("global_step*"))
    assert len(kept) == 2, kept
    assert (tree.out / "checkpoints" / "latest").read_text().strip() in kept
    tree.assert_gone()


def test_a_closed_terminal_saves_and_ends_the_run(tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"some text to learn\n" * 2000)
    argv = [sys.executable, "-m", "torchloom", "train", "--no-compile", "--data", str(text)]
    argv += ["--out", str(tmp_path / "out"), "--seq-len", "16", "--steps", "100000"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(argv[0], argv, envs.child_environment({"OMP_NUM_THREADS": "1"}))
    metrics = tmp_path / "out" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert time.monotonic() < deadline
            read_some(terminal)
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    finally:
        if "status" not in locals():
            os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (tmp_path / "out" / "checkpoints" / "latest").exists()
    assert (tmp_path / "out" / "summary.json").exists()


def read_some(terminal: int) -> bytes:
    """Read what the run prints, so that it does not wait for a reader."""
    return os.read(terminal, 1 << 16)


def test_stopped_before_anything_is_saved(grow) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        tree = grow("--steps", 100_000)
        deadline = time.monotonic() + 300
        while len(tree.workers()) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        tree.process.send_signal(number)
        assert tree.end() == 128 + number, tree.text
        assert "Traceback" not in tree.text
        tree.assert_gone()


def test_full_memory_is_told_with_rank_and_phase(grow, tmp_path) -> None:
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))

    text = tmp_path / "long.txt"
    with text.open("wb") as file:
        file.truncate(60 << 20)
    sizes = ("--micro-batch", 50_000, "--seq-len", 512)
    tree = grow("--steps", 3, *sizes, "--data", text, limits=limit)
    assert tree.end() == 1, tree.text
    assert "] NoMemoryError: rank " in tree.text
    assert "ran out of host memory" in tree.text
    assert "--micro-batch" in tree.text
    assert "Traceback" not in tree.text
    tree.assert_gone()
