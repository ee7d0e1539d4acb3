"""What torch's C++ prints of a key-value store that has gone, where torchloom says it itself.

A request to a store whose process has ended raises an error, and before that prints a warning with a
stack of C++ on stderr. No order of calls avoids it: the process may end while it answers. The level
of c10's warnings is a global of its library, read at each of them, and nothing in Python sets it after
torch was imported; `TORCH_CPP_LOG_LEVEL` is read at the import alone.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from torchloom import envs

_FATAL = 3
"""c10's levels: 0 information, 1 warning, 2 error, 3 fatal."""

_LOCK = threading.Lock()
_HELD: list[int] = []
"""The level from before, once for each thread that is inside."""


@contextmanager
def hushed_store() -> Iterator[None]:
    """Print no warning or error of c10's within a `with` block whose errors are told in a sentence.

    `TORCHLOOM_TRACEBACK=1` leaves them as they are.
    """
    level = _level()
    if level is None or envs.is_on("TORCHLOOM_TRACEBACK"):
        yield
        return
    with _LOCK:
        _HELD.append(_HELD[0] if _HELD else level.value)
        level.value = max(level.value, _FATAL)
    try:
        yield
    finally:
        with _LOCK:
            before = _HELD.pop()
            if not _HELD:
                level.value = before


@functools.cache
def _level() -> ctypes.c_int | None:
    """Return the global that holds the level; None where this build of torch has none."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
