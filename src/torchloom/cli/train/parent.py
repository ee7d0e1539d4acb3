"""A worker ends with its launcher, also when the launcher is killed and can say nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from torchloom import envs

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


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
