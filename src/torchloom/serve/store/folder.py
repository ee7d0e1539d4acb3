"""A store: a folder that many processes may use at once, and that a killed process leaves whole.

    objects/ab/abcdef...    bytes, named by their hash: equal pieces are stored once
    entries/<key>.json      what a program is made of: hashes of objects, and what its key was made of
    records/<key>.json      what was seen while a program was built, for reports
    locks/<key>             held while a program is built, so that it is built once

It holds no absolute path, so it may be moved or copied. What it holds is code, and nothing of it is used before it is
known that this user wrote it: entries are signed (`store.signing_key`) and name their objects by hash, and files and
folders that others can write to are refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchloom.errors import ArtifactError
from torchloom.files import (
    make_own,
    open_plain,
    read_own,
    why_not_own,
    why_replaceable,
    write_whole,
)
from torchloom.serve.store.signing_key import SigningKey

VERSION = 9
_LOOK_S = 0.05
_NAME = re.compile(r"[0-9a-f]{64}")


class Store:
    """Artifacts in a folder.

    Args:
        root: the folder; made when something is stored.

    Example:
        >>> import tempfile
        >>> store = Store(tempfile.mkdtemp())
        >>> digest = store.put(b"code")
        >>> store.get(digest)
        b'code'
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def put(self, content: bytes) -> str:
        """Store bytes and return their name, which is their hash.

        What is there already, and whole, is not written again.
        """
        digest = hashlib.sha256(content).hexdigest()
        if self.fault(digest):
            path = self._object(digest)
            make_own(path.parent)
            write_whole(path, content)
        return digest

    def fault(self, digest: str) -> str:
        """Return why the bytes of a name cannot be used, or nothing."""
        try:
            self.get(digest)
        except ArtifactError as error:
            return str(error)
        return ""

    def get(self, digest: str) -> bytes:
        """Return the bytes of a name.

        Raises:
            ArtifactError: they are missing or damaged, or others can write to them.
        """
        if not _NAME.fullmatch(digest):
            raise ArtifactError(f"{digest!r} is no name of an object: build again")
        path = self._object(digest)
        content = _read(path)
        if hashlib.sha256(content).hexdigest() != digest.partition(".")[0]:
            raise ArtifactError(
                f"{path} is damaged ({len(content)} bytes, its hash differs from its name): delete it "
                "and build again"
            )
        return content

    def save(self, key: str, entry: Mapping[str, Any]) -> None:
        """Store what a program is made of, signed; its objects have to be there already.

        Raises:
            ArtifactError: there is no key to sign with.
        """
        # As it will be read: JSON has no tuples, and names that are texts alone.
        plain = json.loads(json.dumps({**entry, "version": VERSION}))
        signed = {**plain, "signature": SigningKey(make=True).sign(key, plain)}
        path = self._entry(key)
        make_own(path.parent)
        write_whole(path, json.dumps(signed, sort_keys=True) + "\n")

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return all entries that can be used, by key."""
        return self.look()[1]

    def look(self) -> tuple[list[str], dict[str, dict[str, Any]]]:
        """Return what is wrong with entries that cannot be used, and the others by key."""
        broken, found = [], {}
        read, unread = self.unverified()
        try:
            self.check()
            key = SigningKey() if read else None
        except ArtifactError as error:
            return [str(error)], {}
        for name, entry in read.items():
            assert key is not None, "there are entries"
            try:
                found[name] = self._verified(name, entry, key)
            except ArtifactError as error:
                broken.append(str(error))
        return [*unread, *broken], found

    def unverified(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Return all entries as they stand there, which may be anybody's, and what cannot be read.

        They are to be shown or compared, never to be followed.
        """
        found, unread = {}, []
        for path in sorted(self._entry("x").parent.glob("*.json")):
            try:
                entry = self._parsed(path)
            except ArtifactError as error:
                unread.append(str(error))
                continue
            if entry is not None:
                found[path.stem] = entry
        return found, unread

    def check(self) -> None:
        """Make sure that nobody else can write to the store, which need not exist.

        Raises:
            ArtifactError: somebody can, or it belongs to another user.
        """
        try:
            reason = self._why_not_own()
        except (OSError, ValueError, RuntimeError) as error:  # no path, or a loop of links
            raise ArtifactError(
                f"the store {str(self.root)!r} cannot be used: {error}; name a folder of yours"
            ) from error
        if reason:
            raise ArtifactError(
                f"the store {self.root} is not used: {reason}, and what a store holds is run as code. "
                f"If you know what is in it, make a copy of your own in a folder of yours with `cp -r "
                f"--no-preserve=all`, or take the permission away with `chmod -R go-w`"
            )

    def _why_not_own(self) -> str:
        root = self.root.resolve()
        folders = [root, *(root / name for name in ("objects", "entries", "locks"))]
        folders += [each for each in (root / "objects").glob("*") if each.is_dir()]
        reasons = [why_not_own(each) for each in folders if each.exists()]
        return next((reason for reason in reasons if reason), "") or why_replaceable(root) or ""

    def sign(self, key: str, entry: Mapping[str, Any]) -> None:
        """Sign what `unverified` returned, after its user has looked at it.

        Raises:
            ArtifactError: the store can be written by others.
        """
        self.check()
        self.save(key, {name: each for name, each in entry.items() if name != "signature"})

    def saved_at(self, key: str) -> float:
        """Return when an entry was written, in seconds since 1970."""
        return self._entry(key).stat().st_mtime

    @property
    def is_read_only(self) -> bool:
        """Whether there is a store, and this user may not add to it."""
        folders = [self.root, *(self.root / name for name in ("entries", "objects", "locks"))]
        there = [each for each in folders if each.is_dir()]
        return len(there) > 1 and not all(
            os.access(each, os.W_OK | os.X_OK, effective_ids=True) for each in there
        )

    @contextmanager
    def building(self, key: str, timeout_s: float = 1800.0) -> Iterator[None]:
        """Hold the right to build a program; the kernel takes it back from a process that dies.

        Raises:
            ArtifactError: another process has held it for longer than `timeout_s`; or others can write to
                the store, or there is no key to sign with.
        """
        path = self.root / "locks" / key
        self.check()
        SigningKey(make=True)  # before minutes of work that could not be signed
        try:
            make_own(path.parent)
            handle = open_plain(path, os.O_RDWR, 0o644)
        except OSError as error:
            raise ArtifactError(
                f"the store {self.root} cannot be written: {error}; use another folder, or only load from it"
            ) from error
        deadline = time.monotonic() + timeout_s
        try:
            while not _locked(handle):
                if time.monotonic() > deadline:
                    raise ArtifactError(
                        f"another process has been building {key} for more than {timeout_s:.0f} s: "
                        f"look for it with `fuser {path}`, or use another store"
                    )
                time.sleep(_LOOK_S)
            yield
        finally:
            os.close(handle)

    def record_path(self, key: str) -> Path:
        """Return where the record of a program's last build is."""
        return self.root / "records" / f"{key}.json"

    def _object(self, digest: str) -> Path:
        return self.root / "objects" / digest[:2] / digest

    def _entry(self, key: str) -> Path:
        return self.root / "entries" / f"{key}.json"

    def _parsed(self, path: Path) -> dict[str, Any] | None:
        if not path.exists():
            return None
        try:
            entry = json.loads(_read(path))
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{path} is damaged: {error}; delete it and build again") from error
        if not isinstance(entry, dict) or entry.get("version") != VERSION:
            raise ArtifactError(
                f"{path} is of another version of the format; delete it and build again"
            )
        return entry

    def _verified(self, name: str, entry: Mapping[str, Any], key: SigningKey) -> dict[str, Any]:
        said = {part: value for part, value in entry.items() if part != "signature"}
        if reason := key.why_not(name, said, entry.get("signature")):
            raise ArtifactError(
                f"{self._entry(name)} is not used: {reason}. If it is yours from elsewhere, look at it and "
                f"sign it with `torchloom serve trust {self.root}`; otherwise delete it and build again"
            )
        del said["version"]
        return said


def _read(path: Path) -> bytes:
    try:
        return read_own(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ArtifactError(
            f"{path} cannot be read: {reason}; delete it and build again"
        ) from error


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
