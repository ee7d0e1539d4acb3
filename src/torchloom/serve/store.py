"""A folder of artifacts that many processes may use at once, and that a killed one leaves whole.

    objects/ab/abcdef...    bytes, named by their hash: equal pieces are stored once
    entries/<key>.json      what a program is made of: hashes of objects, and what its key was made of
    records/<key>.json      what was seen while a program was built, for reports
    locks/<key>             held while a program is built, so that it is built once

Nothing in it is an absolute path: a store may be moved or copied.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchloom.errors import ArtifactError
from torchloom.files import write_whole

VERSION = 2
_LOOK_S = 0.05


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

    def put(self, content: bytes, suffix: str = "") -> str:
        """Store bytes and return their name, which is their hash and the suffix.

        What is there already is not written again.
        """
        digest = hashlib.sha256(content).hexdigest() + suffix
        path = self._object(digest)
        if not path.exists() or path.stat().st_size != len(content):
            write_whole(path, content)
        return digest

    def checked(self, digest: str) -> Path:
        """Return where the bytes of a name are, once they are known to be whole.

        Raises:
            ArtifactError: they are missing or damaged.
        """
        self.get(digest)
        return self._object(digest)

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
            ArtifactError: they are missing or damaged.
        """
        path = self._object(digest)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror}; build again") from error
        if hashlib.sha256(content).hexdigest() != digest.partition(".")[0]:
            raise ArtifactError(
                f"{path} is damaged ({len(content)} bytes, its hash differs from its name): delete it "
                "and build again"
            )
        return content

    def save(self, key: str, entry: Mapping[str, Any]) -> None:
        """Store what a program is made of; its objects have to be there already."""
        text = json.dumps({"version": VERSION, **entry}, indent=1, sort_keys=True)
        write_whole(self._entry(key), text + "\n")

    def load(self, key: str) -> dict[str, Any] | None:
        """Return what a program is made of, None if it is not here.

        Raises:
            ArtifactError: the entry is damaged or of another version.
        """
        return self._read(self._entry(key))

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return all entries that can be read, by key."""
        return self.look()[1]

    def look(self) -> tuple[list[str], dict[str, dict[str, Any]]]:
        """Return what is wrong with entries that cannot be read, and the others by key."""
        broken, found = [], {}
        for path in sorted(self._entry("x").parent.glob("*.json")):
            try:
                entry = self._read(path)
            except ArtifactError as error:
                broken.append(str(error))
                continue
            if entry is not None:
                found[path.stem] = entry
        return broken, found

    def saved_at(self, key: str) -> float:
        """Return when an entry was written, in seconds since 1970."""
        return self._entry(key).stat().st_mtime

    @contextmanager
    def building(self, key: str, timeout_s: float = 1800.0) -> Iterator[None]:
        """Hold the right to build a program; the kernel takes it back from a process that dies.

        Raises:
            ArtifactError: another process has held it for longer than `timeout_s`.
        """
        path = self.root / "locks" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{path} is damaged: {error}; delete it and build again") from error
        if not isinstance(entry, dict) or entry.pop("version", None) != VERSION:
            raise ArtifactError(
                f"{path} is of another version of the format; delete it and build again"
            )
        return entry


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Say in what the factors of two keys differ, one line each.

    Example:
        >>> differences({"torch": "2.13.0", "isa": "avx2"}, {"torch": "2.12.1", "isa": "avx2"})
        ["torch: '2.13.0' here, '2.12.1' there"]
    """
    lines = []
    for name in sorted(wanted.keys() | found.keys()):
        here, there = wanted.get(name), found.get(name)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            lines += [f"{name}, {line}" for line in differences(here, there)]
        elif here != there:
            lines.append(f"{name}: {_shown(here)} here, {_shown(there)} there")
    return lines


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
