"""Memory that all ranks of one host map, without a name that could be left behind.

Rank 0 makes an anonymous memory file and tells the others its process and descriptor; they open it
through /proc and check a random mark in its first bytes, so that nobody maps what is not meant. The
memory lives exactly as long as the mappings, also when a process is killed.

    [mark 64 bytes][data: what the owner asked for, zero at first]
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchloom.exchange import Exchange
from torchloom.runtime.base import UnavailableError

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""


@dataclass(frozen=True)
class Arena:
    """One shared mapping, as this rank sees it."""

    mapping: mmap.mmap

    def tensor(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a part of the data as a flat tensor, which holds the mapping.

        Its storage is that part alone: whoever saves or copies it takes nothing else along.

        Args:
            offset_bytes: from the beginning of the data.
            numel: elements.
            dtype: of the elements.
        """
        offset = ALIGNMENT + offset_bytes
        return torch.frombuffer(self.mapping, dtype=dtype, count=numel, offset=offset)

    def words(self, offset_bytes: int, count: int) -> memoryview:
        """Return a part of the data as unsigned 64-bit integers, which hold the mapping."""
        start = ALIGNMENT + offset_bytes
        return memoryview(self.mapping)[start : start + 8 * count].cast("Q")


def make_arena(peers: list[Peer], rank: int, exchange: Exchange, nbytes: int) -> Arena:
    """Make an arena together with the other ranks; all must call with equal sizes.

    Args:
        peers: the processes, by rank.
        rank: this one.
        exchange: how the ranks tell each other.
        nbytes: bytes of data.

    Raises:
        UnavailableError: on every rank, when any of them could not map the memory.
    """
    total = -(-(ALIGNMENT + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    offer, descriptor = _offer(total) if rank == 0 else ({}, None)
    try:
        made = json.loads(exchange.texts("offer", json.dumps(offer))[0])
        mapping, problem = None, made.get("problem", "")
        if not problem:
            try:
                mapping = _map(peers[0], made, total, own=descriptor)
            except OSError as error:
                problem = f"rank {rank} cannot map the memory of rank 0: {error.strerror or error}"
        problems = [text for text in exchange.texts("mapped", problem) if text]
    finally:
        if descriptor is not None:
            os.close(descriptor)
    if problems or mapping is None:
        raise UnavailableError(problems[0] if problems else "no memory was offered")
    return Arena(mapping)


def free_bytes() -> int:
    """Return how much memory this machine, or this container, can still give."""
    limits = [_left_in_group(*group) for group in _CGROUPS]
    return max(0, min(_meminfo("MemAvailable"), *(left for left in limits if left is not None)))


def _left_in_group(limit: str, used: str) -> int | None:
    try:
        return int(Path(limit).read_text()) - int(Path(used).read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None


_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) << 10
    raise OSError(f"/proc/meminfo has no {name}")


def _offer(total: int) -> tuple[dict[str, object], int | None]:
    """Make the memory, all of it now: a shortage is a reason today, not a SIGBUS tomorrow."""
    mebibytes = total / (1 << 20)
    descriptor = None
    try:
        free = free_bytes()
        if total > free:
            reason = f"only {free / (1 << 20):.0f} MiB are free"
            return {"problem": f"{mebibytes:.0f} MiB of memory are needed, {reason}"}, None
        descriptor = os.memfd_create("torchloom")
        os.posix_fallocate(descriptor, 0, total)
        mark = secrets.token_hex(ALIGNMENT // 2)
        os.pwrite(descriptor, mark.encode(), 0)
    except (OSError, AttributeError) as error:
        if descriptor is not None:
            os.close(descriptor)
        reason = getattr(error, "strerror", None) or str(error)
        return {"problem": f"{mebibytes:.0f} MiB of memory could not be made: {reason}"}, None
    return {"fd": descriptor, "mark": mark}, descriptor


def _map(owner: Peer, made: dict[str, object], total: int, own: int | None) -> mmap.mmap:
    path = f"/proc/{owner.pid}/fd/{made['fd']}"
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC) if own is None else own
    try:
        if os.fstat(descriptor).st_size != total:
            raise OSError(f"{path} is another file")
        # Page tables are filled now, not in the middle of the first steps.
        mapping = mmap.mmap(descriptor, total, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        if own is None:
            os.close(descriptor)
    if mapping[:ALIGNMENT].decode("ascii", "replace") != made["mark"]:
        raise OSError(f"{path} is another file")
    return mapping


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
