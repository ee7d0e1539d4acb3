"""The processes of one run, found by a variable that they inherit, and what they leave behind."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from contextlib import suppress
from pathlib import Path

_SHM = Path("/dev/shm")
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Tree:
    """Everything that is started with its environment.

    Args:
        temporary: the folder for its temporary files.
    """

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary
        temporary.mkdir(parents=True)
        self._mark = uuid.uuid4().hex
        self._shared_before = set(_SHM.iterdir())

    def environment(self) -> dict[str, str]:
        """Return the variables for its processes; compilers keep their files elsewhere."""
        inherited = {key: value for key, value in os.environ.items() if key not in _LAUNCHERS}
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(self.temporary.with_name("cache")),
            **inherited,
            "SOAK_OF": self._mark,
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "0",
        }

    def workers(self) -> dict[int, int]:
        """Return the ranks' process ids by rank."""
        found: dict[int, int] = {}
        for pid in self.pids():
            rank = _variables(pid).get(b"RANK")
            if rank is not None:
                found[int(rank)] = min(pid, found.get(int(rank), pid))
        return dict(sorted(found.items()))

    def pids(self) -> list[int]:
        """Return its living processes."""
        numbers = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
        mark = self._mark.encode()
        return [pid for pid in numbers if _variables(pid).get(b"SOAK_OF") == mark]

    def kill(self, pid: int) -> bool:
        """Kill a process; return whether it was there."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def wait_gone(self, limit_s: float) -> float | None:
        """Wait until no process is left; return the seconds, None if they took longer."""
        started = time.monotonic()
        while time.monotonic() - started < limit_s:
            if not self.pids():
                return time.monotonic() - started
            time.sleep(0.05)
        return None

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.pids():
            self.kill(pid)

    def temporary_files(self) -> list[str]:
        """Return the names in its temporary folder."""
        return sorted(each.name for each in self.temporary.iterdir())

    def shared_memory(self) -> list[str]:
        """Return what came to /dev/shm since the start; names of others' processes do not count."""
        own = {str(pid) for pid in self.pids()}
        living = {each.name for each in Path("/proc").iterdir() if each.name.isdigit()} - own
        new = {each.name for each in set(_SHM.iterdir()) - self._shared_before}
        return sorted(name for name in new if not living & set(re.findall(r"\d+", name)))


def _variables(pid: int) -> dict[bytes, bytes]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return {}
    pairs = (each.partition(b"=") for each in raw.split(b"\0"))
    return {name: value for name, _, value in pairs}
