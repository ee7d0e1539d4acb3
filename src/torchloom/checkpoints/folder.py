"""Knows the names in a folder of checkpoints, and lets one appear under its name.

    <dir>/<tag>/                          a checkpoint, complete
    <dir>/.torchloom-partial-<id>-<tag>/  one that is being written
    <dir>/.torchloom-old-<id>-<tag>/      one that steps aside for its successor
    <dir>/.torchloom-gone-<id>-<tag>/     one that is being removed
    <dir>/.torchloom.lock                 who writes here
    <dir>/latest                          the newest tag, for people and other programs

A tag that exists is replaced by exchanging the two folders at once. Where the file system cannot do
that, the old one steps aside first, and for that moment is found under its second name.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from torchloom.checkpoints.lock import FOLDERS
from torchloom.checkpoints.manifest import read_manifest
from torchloom.errors import CheckpointError
from torchloom.files import swap
from torchloom.log import get_logger

logger = get_logger(__name__)

LATEST = "latest"
MAX_TAG = 180
"""Longest tag: file systems take 255 bytes, of which names of partial checkpoints need 27 more."""
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+,@~-]*")
_OWN = re.compile(
    r"\.metadata|(engine|index|manifest|rank_\d+)\.json|rng_rank\d+\.pt|__\d+_\d+\.distcp"
)
_WORKING = re.compile(r"\.torchloom-(partial|old|gone)-([0-9a-f]{8})-(.+)")
_MARKS = ("engine.json", "manifest.json", ".metadata")
"""Files of which other folders may have one, but hardly two."""


def root_of(given: str | Path | None) -> Path:
    """Return the path of the folder of a run's checkpoints.

    Raises:
        CheckpointError: none is given; the current folder would be taken for "".
    """
    if given is None or str(given) == "":
        raise CheckpointError(
            f"checkpoints need a folder, got {given!r}: pass its path, equal on all ranks"
        )
    return Path(given)


def check_tag(tag: object) -> str:
    """Return a tag as text.

    Raises:
        CheckpointError: it is not a plain name.

    Example:
        >>> check_tag(12)
        '12'
    """
    if isinstance(tag, int) and not isinstance(tag, bool):
        tag = str(tag)
    if not isinstance(tag, str):
        raise CheckpointError(f"the tag {tag!r} is a {type(tag).__name__}: pass a name or a number")
    if not _TAG.fullmatch(tag) or len(tag) > MAX_TAG or tag == LATEST:
        shown = tag if len(tag) <= MAX_TAG else f"{tag[:40]}... ({len(tag)} characters)"
        raise CheckpointError(
            f"the tag {shown!r} is not a plain name: use at most {MAX_TAG} of the characters A-Z a-z "
            f"0-9 _ . = + , @ ~ -, beginning with a letter, a digit or _, and not {LATEST!r}"
        )
    return tag


def working(root: Path, kind: str, tag: str) -> Path:
    """Return a new path for a checkpoint while it is being written (`partial`), replaced or removed.

    Args:
        root: folder of all checkpoints.
        kind: "partial" while it is written, "old" once replaced, "gone" while it is removed.
        tag: the checkpoint's name.
    """
    return root / f".torchloom-{kind}-{FOLDERS.ident}{secrets.token_hex(2)}-{tag}"


def check_replaceable(path: Path) -> None:
    """Raise unless a new checkpoint may take this name.

    Raises:
        CheckpointError: something else than a checkpoint is there, or files of someone else in it.
    """
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link to {path.readlink()}, and a checkpoint takes the place of no "
            "link: choose another tag, or remove the link"
        )
    if path.exists() and not path.is_dir():
        raise CheckpointError(
            f"{path} exists and is no checkpoint: choose another tag, or remove it"
        )
    strange = foreign_files(path)
    if strange:
        raise CheckpointError(
            f"{path} holds files that are no part of a checkpoint ({', '.join(strange[:3])}), which "
            "replacing it would remove: move them away, or choose another tag"
        )


def check_outside(path: Path, what: str) -> None:
    """Raise if a folder is a checkpoint or lies in one, which other files in it would damage.

    Args:
        path: a folder to write to; it need not exist.
        what: what is to be written.

    Raises:
        CheckpointError: it is, or does.
    """
    path = _target(path)
    for each in (path, *path.parents):
        if sum(_is(each / name, stat.S_ISREG) for name in _MARKS) > 1:
            raise CheckpointError(
                f"{each} is a checkpoint, which {what} in it would damage: pass a folder outside it, "
                f"such as {str(each.parent)!r}"
            )


def foreign_files(path: Path) -> list[str]:
    """Return the names in a folder that no checkpoint has, or why they cannot be told."""
    try:
        names = [each.name for each in path.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"what cannot be listed: {error.strerror}"]
    return sorted(name for name in names if not _OWN.fullmatch(name))


def publish(partial: Path, final: Path) -> Path | None:
    """Let a complete checkpoint appear under its name; return where the one that it replaced is.

    Args:
        partial: the complete checkpoint, still under its working name.
        final: the path it gets, which an older checkpoint may have now.

    Returns:
        The path of the older checkpoint, for the caller to remove; None if there was none.

    Raises:
        OSError: it cannot be renamed; what was under the name is still there.
    """
    if not final.exists():
        partial.rename(final)
        return None
    if swap(partial, final):
        return partial
    aside = working(final.parent, "old", final.name)
    final.rename(aside)
    try:
        partial.rename(final)
    except OSError:
        aside.rename(final)
        raise
    return aside


def find(root: Path, tag: str) -> Path:
    """Return the folder of a tag, also of one whose replacement was broken off half way."""
    final = root / tag
    if _is(final) or not root.is_dir():
        return final
    aside = [path for path in sorted(root.iterdir()) if _is_working(path, "old", tag)]
    return aside[-1] if aside else final


def tags(root: Path) -> list[str]:
    """Return the names of all folders that look like checkpoints; a link to one of them is none."""
    if not root.is_dir():
        return []
    names = set()
    for path in root.iterdir():
        if path.is_symlink() and _target(path).parent == _target(root):
            continue
        found = _WORKING.fullmatch(path.name)
        name = found[3] if found is not None and found[1] == "old" else path.name
        if _TAG.fullmatch(name) and is_checkpoint(find(root, name)):
            names.add(name)
    return sorted(names)


def is_checkpoint(path: Path) -> bool:
    """Say whether a folder holds what only checkpoints hold, or is one into which the system lets us not look."""
    names = ("engine.json", "manifest.json")
    return any(_is(path / name, stat.S_ISREG, where_closed=True) for name in names)


def clean(root: Path) -> None:
    """Remove what killed saves left; only for the holder of the folder's lock.

    A checkpoint that stepped aside for another one which then never came takes its name back.
    """
    for path in root.iterdir():
        found = _WORKING.fullmatch(path.name)
        if found is None or path.is_symlink() or not _is(path, stat.S_ISDIR):
            continue
        if found[2].startswith(FOLDERS.ident):  # a save of this process that is under way
            continue
        if found[1] == "old" and not _is(root / found[3]):
            path.rename(root / found[3])
        else:
            remove(path)


def remove(path: Path) -> None:
    """Remove a folder that nobody looks for; what cannot be removed stays, with a warning."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)


def retire(path: Path) -> None:
    """Remove a checkpoint so that it is whole or gone at every moment.

    One that was renamed, or that a link in the folder points to, is somebody's choice: it stays.
    """
    found = _WORKING.fullmatch(path.name)
    tag = path.name if found is None else found[3]
    aside = working(path.parent, "gone", tag)
    try:
        if path.is_symlink() or read_manifest(path).tag != tag or _is_linked(path):
            logger.info("%s stays: it was renamed, or a link points to it", path)
            return
        path.rename(aside)
    except (OSError, CheckpointError) as error:
        logger.warning("cannot remove the old checkpoint %s: %s", path, error)
        return
    remove(aside)


def _is_linked(path: Path) -> bool:
    """Say whether a link beside a folder points to it, or into it."""
    links = [_target(each) for each in path.parent.iterdir() if each.is_symlink()]
    return any(_target(path) in (each, *each.parents) for each in links)


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises where links go in circles


def _is(path: Path, kind: Callable[[int], bool] = bool, *, where_closed: bool = False) -> bool:
    """Say whether something of a kind is there; `where_closed` where this user may not see."""
    try:
        return kind(path.stat().st_mode)
    except PermissionError:
        return where_closed
    except (OSError, ValueError):
        return False


def _is_working(path: Path, kind: str, tag: str) -> bool:
    found = _WORKING.fullmatch(path.name)
    return found is not None and found[1] == kind and found[3] == tag and is_checkpoint(path)
