"""Who shares the memory: processes of one host, and whether they are still there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple


class Peer(NamedTuple):
    """One rank's process. Its start time tells it from a later one with the same id."""

    host: str
    """Changes with every boot and differs between containers that do not see each other."""
    pid: int
    started: str

    @staticmethod
    def me() -> Peer:
        """Describe this process.

        Raises:
            OSError: there is no /proc to read.
        """
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/pid").readlink()
        pid = os.getpid()
        return Peer(f"{boot} {space}", pid, _start_of(pid))

    def to_text(self) -> str:
        """Return the peer as text for the store."""
        return json.dumps(self)

    @staticmethod
    def from_text(text: str) -> Peer:
        """Read what `to_text` wrote."""
        return Peer(*json.loads(text))

    def is_alive(self) -> bool:
        """Whether the process still runs; one that has ended and was not waited for does not."""
        try:
            return _start_of(self.pid) == self.started
        except OSError:
            return False


def _start_of(pid: int) -> str:
    text = Path(f"/proc/{pid}/stat").read_text()
    # The name in parentheses may hold anything; the fields behind it are numbered from 3.
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return fields[19]
