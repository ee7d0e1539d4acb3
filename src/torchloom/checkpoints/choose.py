"""Which checkpoints of a folder there are and in which order, which one all ranks load, and which are too many.

To load, rank 0 proposes one and each rank verifies a share of its files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from torchloom.checkpoints import folder
from torchloom.checkpoints.manifest import (
    NAME,
    Manifest,
    check_files,
    check_names,
    check_sizes,
    read_manifest,
)
from torchloom.checkpoints.together import SaveExchange
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


_MANY = 3


def choose(root: Path, tag: str | None, ranks: SaveExchange) -> Path:
    """Return the checkpoint to load, verified on all ranks.

    Args:
        root: the folder of all checkpoints of the run.
        tag: the one to load; None takes the newest that verifies, and says why newer ones do not.
        ranks: all of them.

    Raises:
        CheckpointError: there is none.
    """
    told = ranks.together(
        f"no checkpoint can be loaded from {str(root)!r}",
        lambda: _proposals(root, tag) if ranks.rank == 0 else None,
    )
    passed: list[str] = []
    for name, path in told[0]:
        wrong = _verify(Path(path), ranks)
        if not wrong:
            return Path(path)
        reason = f"checkpoint {name!r} cannot be loaded: {_shown(wrong)}"
        if tag is not None:
            raise CheckpointError(
                f"{reason}. Load another one, or leave tag out to take the newest"
            )
        passed.append(reason)
        if ranks.rank == 0:
            logger.warning("%s; taking the one before it", reason)
    raise CheckpointError(
        f"no checkpoint in {str(root)!r} can be loaded: {'; '.join(passed[:_MANY])}"
    )


def _proposals(root: Path, tag: str | None) -> list[tuple[str, str]]:
    found = candidates(root)
    have = ", ".join(each.tag for each in found) or "none"
    closed = folder.closed(root)
    if tag is not None:
        path = folder.find(root, tag)
        if tag in closed:
            raise CheckpointError(f"{path} cannot be looked into: {closed[tag]}; others: {have}")
        if not folder.is_checkpoint(path):
            raise CheckpointError(
                f"checkpoint {tag!r} in {str(root)!r} is missing or incomplete; complete ones: {have}"
            )
        return [(tag, str(path))]
    for name, why in closed.items():
        logger.warning("%s is passed over, it cannot be looked into: %s", root / name, why)
    usable = [each for each in found if each.manifest is None or each.manifest.is_latest]
    if not usable:
        raise CheckpointError(
            f"no checkpoint in {str(root)!r} was saved as the latest one: check the folder, or name a "
            f"tag (there are: {have})"
        )
    return [(each.tag, str(each.path)) for each in usable]


def _verify(path: Path, ranks: SaveExchange) -> list[str]:
    """Return what is wrong, the same on all ranks."""
    told = ranks.together(
        f"checkpoint {str(path)!r} cannot be verified", lambda: _look(path, ranks)
    )
    wrong: list[str] = []
    for rank, (_, sentences) in enumerate(told):
        wrong += [s if ranks.world_size == 1 else f"rank {rank}: {s}" for s in sentences]
    if not wrong and len({seal for seal, _ in told}) > 1:
        wrong = [
            f"the ranks do not see the same files in {path}: it must be on a shared file system"
        ]
    return wrong


def _look(path: Path, ranks: SaveExchange) -> tuple[str, list[str]]:
    if not path.is_dir():
        return "", [f"{path} is missing"]
    try:
        manifest = read_manifest(path)
        seal = hashlib.sha256((path / NAME).read_bytes()).hexdigest()
    except CheckpointError as error:
        return "", [str(error)]
    wrong = check_names(path, manifest) if ranks.rank == 0 else []
    return seal, wrong + check_files(path, manifest, ranks.rank, ranks.world_size)


def _shown(wrong: list[str]) -> str:
    more = f"; and {len(wrong) - _MANY} more" if len(wrong) > _MANY else ""
    return "; ".join(dict.fromkeys(wrong[:_MANY])) + more
