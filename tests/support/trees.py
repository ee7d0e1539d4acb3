"""A real `torchloom train`: its processes, what it prints, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from torchloom import envs

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


class Tree:
    """A command with all the processes that come of it, found by a variable that they inherit.

    Args:
        folder: for its data, output and temporary files.
        options: of `torchloom train`.
        head: what starts Python's modules, for other launchers.
        limits: run in the child before the command.
    """

    def __init__(
        self,
        folder: Path,
        *options: object,
        head: Sequence[str] = (sys.executable,),
        environment: dict[str, str] | None = None,
        limits: Callable[[], None] | None = None,
    ) -> None:
        self.out, self.temporary = folder / "out", folder / "tmp"
        self.temporary.mkdir()
        text = folder / "text.txt"
        text.write_bytes(b"".join(f"{i * i} is the square of {i}\n".encode() for i in range(2000)))
        self._mark = f"TREE_OF={uuid.uuid4().hex}"
        inherited = {k: v for k, v in envs.child_environment({}).items() if k not in _LAUNCHERS}
        name, _, value = self._mark.partition("=")
        own = {name: value, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        self._shared_before = set(Path("/dev/shm").iterdir())
        argv = ["-m", "torchloom", "train", "--no-compile", "--data", text, "--out", self.out]
        argv += ["--seq-len", "16", "--log-every", "1", "--eval-every", "100000", *options]
        self.process = subprocess.Popen(
            [*head, *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**inherited, **own, **(environment or {})},
            preexec_fn=limits,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def await_line(self, words: str, limit_s: float = 300.0, after: int = 0) -> int:
        """Wait until a line after the first `after` has these words; return how many there are."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for index, line in enumerate(self.lines[after:], start=after):
                if words in line:
                    return index + 1
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.02)
        raise AssertionError(f"{words!r} was not said:\n{self.text}")

    def end(self, limit_s: float = 300.0) -> int:
        """Wait for the end; return the exit code."""
        code = self.process.wait(limit_s)
        self._reader.join(10)
        return code

    def pids(self) -> dict[int, str]:
        """Return the processes of this tree with their command lines."""
        numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return {pid: line for pid in numbers if (line := self._line_of(pid)) is not None}

    def _line_of(self, pid: int) -> str | None:
        """Return the command line of a process of this tree; a zombie has none."""
        entry = Path(f"/proc/{pid}")
        try:
            if self._mark.encode() not in (entry / "environ").read_bytes().split(b"\0"):
                return None
            return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode() or None
        except OSError:  # gone, or another user's
            return None

    def workers(self) -> list[int]:
        """Return the ranks' processes by rank."""
        ranks = {}
        for pid in self.pids():
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank = next((e[5:] for e in environ if e.startswith(b"RANK=")), None)
            if rank is not None:
                ranks.setdefault(int(rank), pid)
        return [ranks[rank] for rank in sorted(ranks)]

    def assert_gone(self, limit_s: float = 120.0) -> None:
        """Fail unless within the limit no process, file or shared memory of it is left."""
        deadline = time.monotonic() + limit_s
        while self.pids() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.pids(), self.text
        left = [path for path in self.temporary.iterdir() if "torchinductor" not in path.name]
        assert not left, left
        assert not set(Path("/dev/shm").iterdir()) - self._shared_before

    def kill(self) -> None:
        """End what a failed test left."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # noqa: PERF203  ended by itself
                continue
        self.process.wait(10)
        self._reader.join(10)
        self.process.stdout.close()
