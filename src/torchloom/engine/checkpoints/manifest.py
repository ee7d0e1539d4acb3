"""The manifest of a checkpoint: every file with its size and digests, sealed by a digest of its own.

It is the last file that is written, in one exact spelling: other bytes are damage.
"""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchloom.engine.checkpoints.digests import BLOCK, Sums, blocks_of, check_blocks
from torchloom.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of."""

    files: dict[str, Sums]
    tag: str
    serial: int
    """Place in the order of saving: a clock may be set back."""
    saved_at: float
    """Seconds since 1970."""
    world_size: int
    is_latest: bool = True
    """Whether a load without a tag may take it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Short facts for people: steps, version."""

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "block_bytes": BLOCK,
            "digest": "crc32",
            "tag": self.tag,
            "serial": self.serial,
            "saved_at": self.saved_at,
            "world_size": self.world_size,
            "is_latest": self.is_latest,
            "facts": self.facts,
            "files": {
                name: [sums.size, [f"{crc:08x}" for crc in sums.blocks]]
                for name, sums in sorted(self.files.items())
            },
        }
        return _spell({**body, "seal": hashlib.sha256(_spell(body)).hexdigest()})

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(sums.size for sums in self.files.values())


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or of a later version.
    """
    file = path / NAME
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise CheckpointError(f"{file} is not a regular file")
        raw = file.read_bytes()
        body = json.loads(raw)
        seal = body.pop("seal")
        version = body["format"]
        sealed = hashlib.sha256(_spell(body)).hexdigest() == seal
        is_whole = sealed and raw == _spell({**body, "seal": seal})
        if not is_whole:
            raise CheckpointError(f"{file} is damaged: its bytes are not those that were saved")
        if version != FORMAT or body["block_bytes"] != BLOCK or body["digest"] != "crc32":
            raise CheckpointError(
                f"{file} has format {version!r}, this version of torchloom reads {FORMAT}: load it "
                "with the version that wrote it"
            )
        return _parsed(body)
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is missing: the checkpoint is not complete, or of a format before 3, which this "
            "version does not read"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except (
        ArithmeticError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error


def _parsed(body: dict[str, Any]) -> Manifest:
    files = {
        name: Sums(int(size), [int(crc, 16) for crc in crcs])
        for name, (size, crcs) in body["files"].items()
    }
    for name, sums in files.items():
        if Path(name).name != name or len(sums.blocks) != -(-sums.size // BLOCK):
            raise ValueError(f"the entry of {name!r} has no meaning")
    return Manifest(
        files=files,
        tag=str(body["tag"]),
        serial=int(body["serial"]),
        saved_at=float(body["saved_at"]),
        world_size=int(body["world_size"]),
        is_latest=bool(body["is_latest"]),
        facts=dict(body["facts"]),
    )


def check_names(path: Path, manifest: Manifest) -> list[str]:
    """Return what is in the folder and not in the manifest, or the other way round."""
    try:
        have = {each.name for each in path.iterdir()} - {NAME}
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror or error}"]
    strange = [f"{path / name} is no part of it" for name in sorted(have - manifest.files.keys())]
    gone = [f"{path / name} is missing" for name in sorted(manifest.files.keys() - have)]
    return gone + strange


def check_files(path: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> list[str]:
    """Compare this rank's share of all files with their digests; return what is wrong.

    Args:
        path: folder of the checkpoint.
        manifest: lists its files and digests.
        rank: this rank; it reads every `world_size`-th block, from block `rank` on.
        world_size: number of ranks that share the reading.

    Returns:
        One sentence per bad file; empty if all is as it was saved.
    """
    return check_blocks(path, blocks_of(manifest.files)[rank::world_size])


def check_sizes(path: Path, manifest: Manifest) -> list[str]:
    """Compare names and sizes alone, which takes no time."""
    wrong = check_names(path, manifest)
    for name, sums in manifest.files.items():
        file = path / name
        if file.is_file() and file.stat().st_size != sums.size:
            wrong.append(f"{file} has {file.stat().st_size} bytes, it was saved with {sums.size}")
    return wrong


def _spell(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1) + "\n").encode()
