"""Which checkpoints of a folder there are, in which order, and which are too many."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torchloom.engine.checkpoints import folder
from torchloom.engine.checkpoints.manifest import Manifest, check_sizes, read_manifest
from torchloom.errors import CheckpointError
from torchloom.log import get_logger

logger = get_logger(__name__)


class Candidate(NamedTuple):
    """A checkpoint that may be loaded."""

    tag: str
    path: Path
    manifest: Manifest | None
    """None where it cannot be read."""
    why_not: str = ""
    """Why its manifest cannot be read."""


def candidates(root: Path) -> list[Candidate]:
    """Return all checkpoints of a folder, the newest first.

    One whose manifest cannot be read is placed by the time of its folder.
    """
    found = [candidate(root, tag) for tag in folder.tags(root)]
    read = [(each.manifest.serial, each.manifest.saved_at, each) for each in found if each.manifest]
    ordered = [each for *_, each in sorted(read, key=lambda row: row[:2], reverse=True)]
    for broken in (each for each in found if each.manifest is None):
        place = _modified(broken.path)
        at = next((i for i, each in enumerate(ordered) if _modified(each.path) <= place), None)
        ordered.insert(len(ordered) if at is None else at, broken)
    return ordered


def candidate(root: Path, tag: str) -> Candidate:
    """Return what is known of one checkpoint without reading its data."""
    path = folder.find(root, tag)
    try:
        return Candidate(tag, path, read_manifest(path))
    except CheckpointError as error:
        return Candidate(tag, path, None, str(error))


def next_serial(root: Path) -> int:
    """Return a number above those of all checkpoints of a folder."""
    serials = [each.manifest.serial for each in candidates(root) if each.manifest is not None]
    return 1 + max(serials, default=0)


def prune(root: Path, keep: int, ident: str) -> None:
    """Remove all but the newest `keep` checkpoints that a load without a tag may take.

    One that lacks files does not count, so a whole one stays in its place. Checkpoints saved with
    `save_latest=False` and folders with files of others stay.

    Args:
        root: folder of all checkpoints.
        keep: number of checkpoints to keep.
        ident: of the save that asks; see `folder.working`.
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
                folder.retire(each.path, ident)
        whole += not check_sizes(each.path, each.manifest)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
