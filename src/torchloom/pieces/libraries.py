"""Shared objects loaded from bytes: what was looked at is what is loaded, whatever becomes of its file."""

from __future__ import annotations

import fcntl
import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NUMBERS = itertools.count(1)
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@contextmanager
def in_memory(content: bytes) -> Iterator[str]:
    """Let bytes be a file that nobody can change, and that no folder holds; yield a path to load it by.

    The path is one that no load was given before: the dynamic loader takes an object that it knows by the
    same path for the same object, and descriptors are numbered anew.
    """
    handle = os.memfd_create("loom-library", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(content)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, _SEALS)
        # "/" and "./" lead nowhere, so they can spell a number.
        spelled = "".join("./" if bit == "1" else "/" for bit in f"{next(_NUMBERS):b}")
        yield f"/proc/self/{spelled}fd/{handle}"
    finally:
        os.close(handle)


@contextmanager
def with_suffix(content: bytes) -> Iterator[str]:
    """Do the same with a path that ends in `.so`, for loaders that go by it: a link in a folder of our own."""
    with in_memory(content) as path, tempfile.TemporaryDirectory(prefix="torchloom-") as folder:
        link = Path(folder, "loaded.so")
        link.symlink_to(path)
        yield str(link)
