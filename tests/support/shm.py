"""What the kernel knows of shared memory in this process."""

from __future__ import annotations

from pathlib import Path

NAME = "memfd:torchloom"


def mapped_bytes() -> int:
    """Bytes of address space that maps torchloom's memory."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if NAME in line:
            start, stop = line.split()[0].split("-")
            total += int(stop, 16) - int(start, 16)
    return total


def proportional_bytes() -> int:
    """This process's share of torchloom's memory: a page counts 1/n when n processes map it."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key = line.split()[0]
        if "-" in key and not key.endswith(":"):
            inside = NAME in line
        elif inside and key == "Pss:":
            total += int(line.split()[1]) << 10
    return total


def open_descriptors() -> list[str]:
    """What this process's descriptors lead to."""
    found = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    # The descriptor that listed the folder is gone by now.
    return sorted(str(entry.readlink()) for entry in found if entry.is_symlink())


def files_left() -> list[str]:
    """Files with our name where shared memory with names would lie."""
    return [path.name for path in Path("/dev/shm").iterdir() if "torchloom" in path.name]
