"""Atomic writes, and reads of files that only this user or root can have written.

`write_whole` and `replacing` write a new file and rename it: readers see the old or the new file, never a part, and
nothing is written through a link, a pipe or a folder that stands under the name of either.
`from_plain` builds dataclasses from what JSON held of them.
`read_own` refuses files that other users own or can write to. `read_json_lines` reads what a killed process may have cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import functools
import grp
import json
import os
import pwd
import stat
import tempfile
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

_ROOT = 0
_ALL_IDS = 2**32 - 1
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file with one in each line; lines that are cut or damaged are left out.

    Args:
        path: the file; where there is none, there are no objects.
    """
    try:
        lines = Path(path).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            found += [row] if isinstance(row, dict) else []
    return found


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write a text or bytes atomically and return the path; missing folders are made.

    Several processes may write one path at a time: the last one wins.

    Raises:
        OSError: the folder or the file cannot be written; what was there stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file for writing, which takes the place of `path` when the block ends without an error.

    Raises:
        OSError: the file cannot be written or renamed; what was there stays.
    """
    file = open_partial(path)
    try:
        with file:
            yield file
        Path(file.name).replace(path)
    except BaseException:  # raised on: no half file is left behind, also after Ctrl-C
        Path(file.name).unlink(missing_ok=True)
        raise


def open_partial(path: Path) -> IO[bytes]:
    """Open a new file beside `path`, under a name that nobody can foretell: the file's `name` is its path.

    Raises:
        OSError: the folder is missing or cannot be written.
    """
    file = tempfile.NamedTemporaryFile(  # noqa: SIM115  the caller closes and renames it
        dir=path.parent, prefix=f".{path.name}.", suffix=".partial", delete=False
    )
    Path(file.name).chmod(0o644)  # temporary files are private
    return file


def open_to_append(path: Path) -> IO[str]:
    """Open a text file at its end; it is made where it is missing.

    Raises:
        OSError: the file cannot be written, or is a symbolic link, a pipe or a folder.
    """
    handle = open_plain(path, os.O_WRONLY | os.O_APPEND)
    return os.fdopen(handle, "a", encoding="utf-8", newline="")


def open_plain(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file to write in place and return its descriptor; it is made where it is missing.

    Args:
        path: the file.
        flags: of `os.open`, such as `os.O_RDWR`.
        mode: of a new file.

    Raises:
        OSError: the file cannot be written, or is a symbolic link, a pipe or a folder.
    """
    # O_NONBLOCK: opening a named pipe would wait for a reader.
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    handle = os.open(path, flags, mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise PermissionError(errno.EPERM, "it is no plain file", str(path))
    return handle


def make_own(folder: Path) -> None:
    """Make a folder, and missing folders above it, with mode 755, so that no other user can write to it.

    Raises:
        OSError: the folder cannot be made.
    """
    if not folder.is_dir():
        make_own(folder.parent)
        folder.mkdir(mode=0o755, exist_ok=True)


def read_own(path: Path, others: int = 0o022) -> bytes:
    """Return the bytes of a file that nobody but this user and root can have written.

    Owner and mode are checked on the opened file, so renaming it meanwhile changes nothing.

    Args:
        path: the file; it must not be a symbolic link.
        others: the mode bits that group and others must not have.

    Raises:
        PermissionError: another user owns it or can write to it; the text says so.
        OSError: it cannot be read.
    """
    # O_NONBLOCK: opening a named pipe would wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} is no file")
        if reason := _why_not_own(path, found, others):
            raise PermissionError(reason)
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def why_not_own(path: Path) -> str:
    """Return why other users could have written a file or folder, or an empty text.

    Raises:
        OSError: it is not there.
    """
    return _why_not_own(path, path.stat(), 0o022)


def why_replaceable(path: Path) -> str:
    """Return why other users could replace a file or folder, or an empty text.

    They can if they own a folder above it, or can write to one without the sticky bit. The private group of
    the user (of the same name, with no other member) does not count as others.
    """
    path = path.resolve()
    for folder in path.parents:
        try:
            found = folder.stat()
        except FileNotFoundError:
            continue
        others = 0 if found.st_mode & stat.S_ISVTX else 0o022
        if found.st_mode & others & 0o020 and _is_private_group(found.st_gid):
            others = 0o002
        if _is_hidden(found.st_uid):
            found = os.stat_result((*found[:4], _ROOT, *found[5:]))
        if reason := _why_not_own(folder, found, others):
            return reason
    return ""


def _why_not_own(path: Path, found: os.stat_result, others: int) -> str:
    if found.st_uid not in (_ROOT, os.geteuid()):
        return f"{path} belongs to another user (id {found.st_uid})"
    if found.st_mode & others & 0o022:
        return f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    if found.st_mode & others:
        return f"{path} can be read by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _is_private_group(gid: int) -> bool:
    """Return whether a group is the private group of the user, which many systems make for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        user.pw_uid != _ROOT
        and user.pw_gid == gid
        and group.gr_name == user.pw_name
        and set(group.gr_mem) <= {user.pw_name}
    )


def _is_hidden(uid: int) -> bool:
    """Return whether an owner is hidden because this process runs in a user namespace, as in containers."""
    try:
        shown = int(Path("/proc/sys/kernel/overflowuid").read_text())
        mapped = Path("/proc/self/uid_map").read_text().split()
    except (OSError, ValueError):
        return False
    return uid == shown and mapped != ["0", "0", str(_ALL_IDS)]


def swap(left: Path, right: Path) -> bool:
    """Exchange two paths atomically; return False where the system cannot.

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


def sync_folder(path: Path) -> None:
    """Sync a folder to disk, so that created, renamed and removed files survive a loss of power.

    Raises:
        OSError: the file system refuses.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_hints = functools.cache(typing.get_type_hints)


def from_plain(of: type[Any], data: Any, *, is_exact: bool = False) -> Any:
    """Build a dataclass, and the dataclasses and named tuples in it, from what JSON held of it.

    Args:
        of: the dataclass.
        data: its fields by name; those that have a default may be missing.
        is_exact: refuse fields that the class does not know, also inside of it, instead of leaving them out.

    Raises:
        TypeError: a value has another type than its field, or fields are missing, or refused.
        ValueError: a tuple has another length than its field.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"a {of.__name__} is written as {type(data).__name__}")
    hints = _hints(of)
    if is_exact and (unknown := sorted(data.keys() - hints.keys())):
        raise TypeError(f"a {of.__name__} has no {', '.join(unknown)}")
    return of(
        **{
            key: _value(f"{of.__name__}.{key}", hints[key], data[key], is_exact)
            for key in hints.keys() & data.keys()
        }
    )


def _value(name: str, hint: Any, value: Any, is_exact: bool) -> Any:
    """Return plain data as a value of a field's type."""
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, value, is_exact=is_exact)
    if origin in (typing.Union, types.UnionType):  # a type, or None
        return None if value is None else _value(name, args[0], value, is_exact)
    is_of_many = isinstance(origin, type) and issubclass(origin, (list, tuple, frozenset))
    if is_of_many and isinstance(value, list):
        if hasattr(origin, "_make"):  # a named tuple
            args = tuple(_hints(origin).values())
        is_alike = origin in (list, frozenset) or args[1:] == (...,)
        kinds = args[:1] * len(value) if is_alike else args
        found = [_value(name, *each, is_exact) for each in zip(kinds, value, strict=True)]
        return getattr(origin, "_make", origin)(found)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _value(name, args[1], each, is_exact) for key, each in value.items()}
    fits = {float: (int, float), Any: object}.get(origin, origin)
    if not isinstance(value, fits) or (isinstance(value, bool) and hint in (int, float)):
        raise TypeError(f"{name} cannot be {type(value).__name__}")
    return value
