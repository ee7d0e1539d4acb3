"""Lets one run at a time write into a folder of checkpoints.

The lock is the system's own on an open file (flock), held by the process of rank 0 from the first
save until the last of its engines that saved there is destroyed, or the process ends, however it
ends: a killed run leaves none. It belongs to the file that was opened here, so nobody loses it by
reading the lock file, as a copy of the folder does. It also holds over NFS. The file says who holds
it, for the message to the other one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from torchloom.errors import CheckpointError
from torchloom.files import open_plain
from torchloom.log import get_logger

logger = get_logger(__name__)

NAME = ".torchloom.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


class _Folders:
    """The folders that this process may write into."""

    def __init__(self) -> None:
        self.alone = threading.RLock()
        """Held by the one thread that looks for leftovers, publishes or removes; also where an engine is
        collected meanwhile."""
        self.ident = secrets.token_hex(2)
        """Begins the <id> of what this process works at; see `folder`."""
        self._held: dict[Path, tuple[int, set[object]]] = {}
        """For each folder the open lock file, and the engines that save there."""

    def take(self, root: Path, owner: object) -> None:
        """Take the right to write into a folder, unless it is held here already.

        Args:
            root: the folder.
            owner: stands for the engine that asks.

        Raises:
            CheckpointError: another process holds it.
            OSError: the lock file cannot be written.
        """
        root = root.resolve()
        with self.alone:
            handle, owners = self._held.pop(root, (-1, set()))
            if not _is_at(handle, root / NAME):  # also where someone has removed the file
                _close(handle)
                handle = _locked(root / NAME)
            self._held[root] = handle, owners | {owner}

    def release(self, owner: object) -> None:
        """Let others write into the folders where no other engine here does."""
        with self.alone:
            for root, (handle, owners) in list(self._held.items()):
                owners.discard(owner)
                if not owners:
                    del self._held[root]
                    _close(handle)

    def forked(self) -> None:
        """Hold nothing in a forked process: a worker may outlive a run that is killed."""
        inherited = self._held
        self.__init__()
        for handle, _ in inherited.values():
            os.close(handle)  # the lock itself stays with the parent


FOLDERS = _Folders()
os.register_at_fork(after_in_child=FOLDERS.forked)


def _locked(path: Path) -> int:
    """Return the lock file, open and locked."""
    handle = open_plain(path, os.O_RDWR)
    try:
        _lock(handle, path)
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.ctime()}
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(facts).encode())
    except BaseException:  # KeyboardInterrupt, too: the descriptor holds the lock
        os.close(handle)
        raise
    return handle


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def _close(handle: int) -> None:
    if handle >= 0:
        with contextlib.suppress(OSError):  # a copy in a child that is about to exec holds it too
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _holder(path: Path) -> str:
    try:
        facts = json.loads(path.read_text())
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"see {path}"


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False
