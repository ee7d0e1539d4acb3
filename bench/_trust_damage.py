"""Damage to a checkpoint, the same for torchloom and torch.distributed.checkpoint: both write

__<rank>_0.distcp    tensors, one after the other, as torch.save writes them
.metadata            DCP's index; torchloom reads manifest.json, index.json and engine.json instead
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path, Path], None]
"""Changes the first checkpoint; the second one is an older, whole one."""


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << 3
    path.write_bytes(content)


def _places(path: Path) -> dict[str, tuple[str, int, int]]:
    """Return file, offset and length of each tensor's first piece, by name."""
    index = path / "index.json"
    if index.exists():
        return {
            name: (pieces[0][2], pieces[0][3], pieces[0][4])
            for name, (_, _, pieces) in json.loads(index.read_text()).items()
        }
    held = pickle.loads((path / ".metadata").read_bytes()).storage_data  # just written by us
    return {key.fqn: (each.relative_path, each.offset, each.length) for key, each in held.items()}


def _flip_in(word: str, without: str) -> Damage:
    def change(path: Path, older: Path) -> None:
        places = {
            name: place
            for name, place in _places(path).items()
            if word in name and (not without or without not in name)
        }
        file, offset, length = max(places.values(), key=lambda place: place[2])
        _flip(path / file, offset + length // 2)

    return change


def _flip_metadata(position: float) -> Damage:
    def change(path: Path, older: Path) -> None:
        """In what says where tensors are: DCP's .metadata, our index."""
        file = path / ("index.json" if (path / "index.json").exists() else ".metadata")
        _flip(file, int(position * file.stat().st_size))

    return change


def _cut(path: Path, older: Path) -> None:
    file = path / "__1_0.distcp"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)


def _miss(path: Path, older: Path) -> None:
    (path / "__1_0.distcp").unlink()


def _swap(path: Path, older: Path) -> None:
    shutil.copy(older / "__1_0.distcp", path / "__1_0.distcp")


def _add(path: Path, older: Path) -> None:
    shutil.copy(older / "__0_0.distcp", path / "__7_0.distcp")


DAMAGE: dict[str, Damage] = {
    "untouched": lambda path, older: None,
    "a flipped bit in a weight": _flip_in("blocks", "exp_avg"),
    "a flipped bit in a moment": _flip_in("exp_avg_sq", ""),
    **{
        f"a flipped bit in metadata, at {position}": _flip_metadata(position)
        for position in (0.02, 0.21, 0.37, 0.5, 0.64, 0.83, 0.95)
    },
    "a cut file": _cut,
    "a missing file": _miss,
    "one rank's file of another checkpoint": _swap,
    "an extra file": _add,
}
