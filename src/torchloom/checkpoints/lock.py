"""One run at a time writes into a folder of checkpoints.

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
import socket
import threading
import time
import weakref
from pathlib import Path

from torchloom.errors import CheckpointError
from torchloom.files import open_plain
from torchloom.log import get_logger

logger = get_logger(__name__)

NAME = ".torchloom.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


class Hold:
    """A folder that this process may write to, shared by all its engines that save there."""

    def __init__(self) -> None:
        self.alone = threading.RLock()
        """Held by the one thread that looks for leftovers, publishes or removes."""
        self.living: set[str] = set()
        """Idents of saves that are under way: their folders are no leftovers."""
        self.owners: set[object] = set()
        self.handle = -1


class FolderLock:
    """The right of one engine to write into folders."""

    def __init__(self) -> None:
        self._owner = object()
        weakref.finalize(self, _process.release, self._owner, None, removes=False)

    def take(self, root: Path) -> Hold:
        """Take the right to write into a folder, unless it is held here already.

        Raises:
            CheckpointError: another process holds it.
            OSError: the lock file cannot be written.
        """
        return _process.take(self._owner, root.resolve())

    def release(self, root: Path | None = None) -> None:
        """Let others write into the folder, or into all, when no engine here does any more."""
        _process.release(self._owner, root, removes=True)


class _Process:
    """The folders that this process holds."""

    def __init__(self) -> None:
        self._held: dict[Path, Hold] = {}
        self._mutex = threading.RLock()  # taken again where an engine is collected meanwhile

    def forked(self) -> None:
        """Hold nothing in a forked process: a worker may outlive a run that is killed."""
        inherited = [hold.handle for hold in self._held.values()]
        self._held, self._mutex = {}, threading.RLock()
        for handle in inherited:
            os.close(handle)  # the lock itself stays with the parent

    def take(self, owner: object, root: Path) -> Hold:
        with self._mutex:
            path, hold = root / NAME, self._held.get(root) or Hold()
            if not _is_at(hold.handle, path):
                new = _locked(path)
                _close(hold.handle)
                hold.handle = new
                self._held[root] = hold
            hold.owners.add(owner)
            return hold

    def release(self, owner: object, root: Path | None, *, removes: bool) -> None:
        """Drop an owner's right to write; unlock folders that no other owner here writes to.

        Args:
            owner: the lock of one engine.
            root: the folder; None: all that the owner holds.
            removes: also remove the lock file of an unlocked folder.
        """
        with self._mutex:
            for each in [root.resolve()] if root is not None else list(self._held):
                hold = self._held.get(each)
                if hold is None or owner not in hold.owners:
                    continue
                hold.owners.remove(owner)
                if hold.owners:
                    continue
                del self._held[each]
                if removes and _is_at(hold.handle, each / NAME):
                    (each / NAME).unlink(missing_ok=True)
                _close(hold.handle)


_process = _Process()
os.register_at_fork(after_in_child=_process.forked)


def _locked(path: Path) -> int:
    """Return the lock file, open and locked."""
    while True:
        handle = open_plain(path, os.O_RDWR)
        try:
            _lock(handle, path)
            if _is_at(handle, path):
                facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.ctime()}
                os.ftruncate(handle, 0)
                os.write(handle, json.dumps(facts).encode())
                return handle
        except BaseException:  # KeyboardInterrupt, too: the descriptor holds the lock
            os.close(handle)
            raise
        os.close(handle)  # its holder removed it between opening and locking


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
        there, here = path.stat(), os.fstat(handle)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
