"""One run at a time writes into a folder of checkpoints.

The lock is the system's own on an open file (fcntl), held by rank 0 from the first save until
`engine.destroy()` or the end of the process, however it ends: a killed run leaves none. It also
holds over NFS. The file says who holds it, for the message to the other one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import BinaryIO

from torchloom.errors import CheckpointError
from torchloom.log import get_logger

logger = get_logger(__name__)

NAME = ".torchloom.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


class FolderLock:
    """The right to write into one folder at a time."""

    def __init__(self) -> None:
        self._held: dict[Path, BinaryIO] = {}

    def take(self, root: Path) -> None:
        """Take the right to write into a folder, unless it is held here already.

        Raises:
            CheckpointError: another process holds it.
            OSError: the lock file cannot be written.
        """
        root = root.resolve()
        path, held = root / NAME, self._held.get(root)
        if held is not None and _is_at(held, path):
            return
        self.release(root)
        while True:
            file = path.open("a+b")
            try:
                _lock(file, path)
            except BaseException:
                file.close()
                raise
            if _is_at(file, path):
                break
            file.close()  # its holder removed it between opening and locking
        file.truncate(0)
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.ctime()}
        file.write(json.dumps(facts).encode())
        file.flush()
        self._held[root] = file

    def release(self, root: Path | None = None) -> None:
        """Let others write into the folder, or into all that are held."""
        for each in [root] if root is not None else list(self._held):
            file = self._held.pop(each, None)
            if file is None:
                continue
            if _is_at(file, each / NAME):
                (each / NAME).unlink(missing_ok=True)
            file.close()


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            logger.warning(
                "%s: the file system has no locks, so a second run that saves into this folder will "
                "not be noticed",
                path,
            )
            return
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise CheckpointError(
            f"another run writes checkpoints into {path.parent} ({_holder(path)}): end it, or save "
            "into another folder"
        ) from None


def _holder(path: Path) -> str:
    try:
        facts = json.loads(path.read_text())
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"see {path}"


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        there, here = path.stat(), os.fstat(file.fileno())
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
