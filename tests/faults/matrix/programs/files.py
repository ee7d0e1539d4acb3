"""Checkpoints that are damaged, hostile, cut off or do not fit on the disk (`engine.save_checkpoint`)."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import threading
from pathlib import Path

import torch.distributed as dist

from faults.matrix.programs.rank import Rank


def loads_what_was_damaged(rank: Rank) -> None:
    engine = rank.start()
    rank.step()
    engine.save_checkpoint(rank.folder, tag="one")
    rank.step(1)
    dist.barrier()
    if rank.rank == 0:
        _DAMAGE[rank.arguments["how"]](rank.folder / "one")
    dist.barrier()
    rank.mark()
    engine.load_checkpoint(rank.folder, tag="one")
    rank.finish()


def _largest(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def _flip(folder: Path) -> None:
    path = _largest(folder)
    content = bytearray(path.read_bytes())
    content[len(content) * 5 // 8] ^= 8
    path.write_bytes(content)


def _cut(folder: Path) -> None:
    path = _largest(folder)
    os.truncate(path, path.stat().st_size // 2)


class _Touches:
    """Unpickled, it leaves a file where nothing may be left."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("hostile").absolute(),)


def _forge(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(_Touches()))


_DAMAGE = {"flip": _flip, "cut": _cut, "forge": _forge}


def saves_on_a_full_disk(rank: Rank) -> None:
    """No file may grow beyond some bytes on one rank; then all load the checkpoint before."""
    engine = rank.start()
    rank.step()
    engine.save_checkpoint(rank.folder)
    rank.step(1)
    dist.barrier()
    rank.mark()
    if rank.rank == rank.arguments["who"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    try:
        engine.save_checkpoint(rank.folder)
    finally:  # what this rank prints goes into a file, too
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    rank.finish()


def is_killed_while_saving(rank: Rank) -> None:
    """Save one tag again and again until a rank is killed at some moment."""
    engine = rank.start()
    rank.step()
    engine.save_checkpoint(rank.folder, tag="last")
    if rank.rank == rank.arguments["who"]:
        seconds = rank.arguments["seconds"]
        threading.Timer(seconds, lambda: (rank.mark(), os.kill(os.getpid(), 9))).start()
    for _ in range(100_000):
        engine.save_checkpoint(rank.folder, tag="last")


def resumes(rank: Rank) -> None:
    """Load the newest checkpoint and go on to the same weights as an undisturbed run."""
    engine = rank.start()
    rank.mark()
    path, _ = engine.load_checkpoint(rank.folder)
    assert path is not None, "nothing was loaded"
    for index in range(1, 6):
        rank.step(index)
    rank.finish()
