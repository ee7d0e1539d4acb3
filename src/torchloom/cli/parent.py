"""The link between a worker and its launcher: signals while the worker starts, and the end of both.

A launcher starts workers with signals blocked (`held_back`), because Python would answer Ctrl-C with a
traceback while it starts. The worker unblocks them after it has set its handlers (`begin_worker`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torchloom import envs

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


_HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back() -> Iterator[None]:
    """Block signals; processes that are started in the `with` block inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker() -> None:
    """End this process with its launcher, and on SIGINT or SIGTERM at once and without a traceback."""
    end_with_launcher()
    for sig in _HELD_BACK[:2]:
        signal.signal(sig, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        signal.signal(signal.SIGHUP, _nothing_to_save)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)


def _nothing_to_save(number: int, frame: FrameType | None) -> None:
    """Ignore SIGHUP until the loop sets a handler that saves."""


def end_with_launcher() -> None:
    """Ask the kernel to kill this process when its launcher ends (Linux).

    The signal is SIGKILL, because a rank that waits for others in C++ runs no Python handler. Compile
    workers and data workers of this process watch it and end within seconds. Ranks started by hand
    continue, because the shell that started them may end first.
    """
    pid = envs.launcher_pid()
    envs.drop(envs.LAUNCHER_PID)  # ranks that this process starts have another launcher
    if pid is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != pid:  # it ended before the kernel was asked
        os._exit(128 + signal.SIGKILL)
