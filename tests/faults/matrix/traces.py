"""What a case may leave behind: processes, files in its folders, entries of /dev/shm.

A process belongs to a case when it has inherited the case's variable or is in the session of a forked
rank, whoever its parent is. Anonymous memory files live as long as a process that holds them, so they are left behind where processes are.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

TOKEN = "FAULTS_CASE"
_SHARED = Path("/dev/shm")


def processes_of(token: str, sessions: Collection[int] = ()) -> dict[int, str]:
    """Return the living processes of a case, with their command lines.

    Args:
        token: that its processes have inherited.
        sessions: of ranks that were forked, whose variables `/proc` does not show.
    """
    mark = f"{TOKEN}={token}".encode()
    return {
        pid: line
        for pid in _pids()
        if (line := _command_of(pid))
        and (_session_of(pid) in sessions or mark in _read(pid, "environ").split(b"\0"))
    }


def kill(pids: Iterable[int]) -> None:
    """End processes at once."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def files_in(folder: Path, expected: Iterable[str] = ()) -> list[str]:
    """Return what stands in a folder and was not expected there."""
    return sorted(path.name for path in folder.iterdir() if path.name not in set(expected))


def shared_entries() -> set[str]:
    """Return the names in /dev/shm."""
    return {path.name for path in _SHARED.iterdir()} if _SHARED.is_dir() else set()


def forgotten_entries(before: set[str]) -> list[str]:
    """Return names in /dev/shm that are new and that no living process holds."""
    new = shared_entries() - before
    if new:
        new -= {name for pid in _pids() for name in _held_by(pid)}
    return sorted(new & shared_entries())


def _held_by(pid: int) -> set[str]:
    found = {line.rpartition("/")[2] for line in _read(pid, "maps").decode().splitlines()}
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(entry.readlink().name)
    return found


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _session_of(pid: int) -> int:
    """Return the session of a process, 0 for one that is gone; see proc_pid_stat(5)."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[3]) if fields else 0


def _command_of(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _read(pid: int, name: str) -> bytes:
    """Return a file of /proc; empty for a process that is gone, a zombie or another user's."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
