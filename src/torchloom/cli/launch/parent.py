"""What ties a worker to its launcher: signals while it starts, and the end of both.

A launcher starts workers with signals held back (`held_back`): Python, while it starts, would answer
Ctrl-C with a traceback. They are let in once it is settled what they do (`begin_worker`).
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
    """Let signals wait; processes that are started in the `with` block inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker() -> None:
    """Settle what ends this process: its launcher's end, and signals, at once and quietly."""
    end_with_launcher()
    for sig in _HELD_BACK[:2]:
        signal.signal(sig, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        signal.signal(signal.SIGHUP, _nothing_to_save)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)


def _nothing_to_save(number: int, frame: FrameType | None) -> None:
    """Stand in for a handler that saves."""


def end_with_launcher() -> None:
    """Let the kernel kill this process when the launcher that started it ends (Linux).

    SIGKILL, since a rank that waits for others runs no handler. Compile workers and data workers
    of this process watch it and end within seconds. Ranks started by hand are left alone: the
    shell that started them may well end first.
    """
    pid = envs.launcher_pid()
    if pid is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != pid:  # it ended before the kernel was asked
        os._exit(128 + signal.SIGKILL)
