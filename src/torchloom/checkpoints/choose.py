"""Knows which checkpoints of a folder there are and in which order, which one all ranks load, and which are too many.

To load, rank 0 proposes one and each rank verifies a share of its files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from torchloom.checkpoints import folder
from torchloom.checkpoints.manifest import (
    Manifest,
    check_files,
    check_names,
    read_manifest,
)
from torchloom.checkpoints.rank_task import RankTask
from torchloom.errors import CheckpointError
from torchloom.log import get_logger

logger = get_logger(__name__)

_SHOWN = 3


class Candidate(NamedTuple):
    """A checkpoint that may be loaded."""

    tag: str
    path: Path
    manifest: Manifest | None
    """None where it cannot be read."""
    why_not: str = ""
    """Why its manifest cannot be read."""

    def wrong(self) -> list[str]:
        """Compare all files with their digests; return what is wrong, a sentence per file."""
        return _verify(self.path)[1]


def candidates(root: Path) -> list[Candidate]:
    """Return all checkpoints of a folder: first those whose manifest cannot be read, then the newest first."""
    found = [candidate(root, tag) for tag in folder.tags(root)]
    broken = [each for each in found if each.manifest is None]
    read = [(each.manifest.serial, each.manifest.saved_at, each) for each in found if each.manifest]
    return broken + [each for *_, each in sorted(read, key=lambda row: row[:2], reverse=True)]


def candidate(root: Path, tag: str) -> Candidate:
    """Return what is known of one checkpoint without reading its data."""
    path = folder.find(root, tag)
    try:
        return Candidate(tag, path, read_manifest(path))
    except CheckpointError as error:
        return Candidate(tag, path, None, str(error))


def chosen(root: Path, tag: str | None) -> list[Candidate]:
    """Return the checkpoint of a tag, or all that a load without a tag may take, the first choice first.

    Raises:
        CheckpointError: there is none.
    """
    found = candidates(root)
    have = ", ".join(each.tag for each in found) or "none"
    if tag is not None:
        if not folder.is_checkpoint(folder.find(root, tag)):
            raise CheckpointError(
                f"checkpoint {tag!r} in {str(root)!r} is missing or incomplete; complete ones: {have}"
            )
        return [candidate(root, tag)]
    usable = [each for each in found if each.manifest is None or each.manifest.is_latest]
    if not usable:
        raise CheckpointError(
            f"no checkpoint in {str(root)!r} was saved as the latest one: check the folder, or name a "
            f"tag (there are: {have})"
        )
    return usable


def next_serial(root: Path) -> int:
    """Return a number above those of all checkpoints of a folder."""
    serials = [each.manifest.serial for each in candidates(root) if each.manifest is not None]
    return 1 + max(serials, default=0)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints that a load without a tag may take.

    One that lacks files does not count, so a whole one stays in its place. Checkpoints saved with
    `save_latest=False` and folders with files of others stay.

    Args:
        root: folder of all checkpoints.
        keep: number of checkpoints to keep.
    """
    whole = 0
    for each in candidates(root):
        if each.manifest is None or not each.manifest.is_latest:
            continue
        if whole >= keep:
            strange = folder.foreign_files(each.path)
            if strange:
                logger.warning("%s stays: it holds %s", each.path, ", ".join(strange[:3]))
            else:
                folder.retire(each.path)
        whole += not check_names(each.path, each.manifest)


def choose(root: Path, tag: str | None, ranks: RankTask) -> Path:
    """Return the checkpoint to load, verified on all ranks.

    Args:
        root: the folder of all checkpoints of the run.
        tag: the one to load; None takes the newest that verifies, and says why newer ones do not.
        ranks: all of them.

    Raises:
        CheckpointError: there is none.
    """

    def propose() -> list[tuple[str, str]] | None:
        if ranks.rank == 0:
            return [(each.tag, str(each.path)) for each in chosen(root, tag)]
        return None

    failure = f"no checkpoint in {str(root)!r} can be loaded"
    passed: list[str] = []
    for name, path in ranks.together(failure, propose)[0]:
        wrong = _verify_together(Path(path), ranks)
        if not wrong:
            return Path(path)
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        reason = f"checkpoint {name!r} cannot be loaded: {'; '.join(wrong[:_SHOWN])}{more}"
        if tag is not None:
            raise CheckpointError(
                f"{reason}. Load another one, or leave tag out to take the newest"
            )
        passed.append(reason)
        if ranks.rank == 0:
            logger.warning("%s; taking the one before it", reason)
    raise CheckpointError(f"{failure}: {'; '.join(passed[:_SHOWN])}")


def _verify_together(path: Path, ranks: RankTask) -> list[str]:
    """Return what is wrong, the same on all ranks."""
    told = ranks.together(
        f"checkpoint {str(path)!r} cannot be verified",
        lambda: _verify(path, ranks.rank, ranks.world_size),
    )
    wrong = [
        sentence if ranks.world_size == 1 else f"rank {rank}: {sentence}"
        for rank, (_, sentences) in enumerate(told)
        for sentence in sentences
    ]
    if not wrong and len({seal for seal, _ in told}) > 1:
        return [
            f"the ranks do not see the same files in {path}: it must be on a shared file system"
        ]
    return wrong


def _verify(path: Path, rank: int = 0, world_size: int = 1) -> tuple[str, list[str]]:
    """Return a digest of the manifest, and what is wrong with this rank's share of the files."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return "", [str(error)]
    seal = hashlib.sha256(manifest.to_bytes()).hexdigest()
    wrong = check_names(path, manifest) if rank == 0 else []
    return seal, wrong or check_files(path, manifest, rank, world_size)
