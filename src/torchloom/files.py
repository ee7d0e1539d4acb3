"""Files that are whole or not there: what is written beside a file takes its place at once."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write a text or bytes so that no reader ever sees half of it, and return its path; folders are made.

    Several processes may write one path at a time: the last one wins.

    Raises:
        OSError: the folder or the file cannot be written; what was there stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        Path(partial).chmod(0o644)  # temporary files are private
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return path


def sync_folder(path: Path) -> None:
    """Make what was created, renamed or removed in a folder survive a loss of power.

    Raises:
        OSError: the file system refuses.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def swap(left: Path, right: Path) -> bool:
    """Let two paths change places at once; return False where the system cannot.

    Linux does this with renameat2(RENAME_EXCHANGE), on local file systems; network file systems
    mostly refuse it.

    Raises:
        OSError: the paths cannot be renamed.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done = rename(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE)
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(right))
