"""Run users' files as modules or scripts, and tie the processes of a command to each other.

A child imports from the same folders as its parent (`interpreter`).

A launcher starts workers with signals blocked (`held_back`), because Python would answer Ctrl-C with a
traceback while it starts. The worker unblocks them after it has set its handlers (`begin_worker`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from torchloom import envs
from torchloom.errors import TorchloomError

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


def load_file(path: str | Path) -> ModuleType:
    """Import a file under its stem, with its folder on `sys.path`.

    Raises:
        TorchloomError: there is no such file.
    """
    file = Path(path)
    if not file.is_file():
        raise TorchloomError(f"there is no file {str(path)!r}: write FILE.py:function")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))
    spec.loader.exec_module(module)
    return module


def load_function(named: str) -> Callable[..., Any]:
    """Import the function that `FILE.py:function` names.

    Raises:
        TorchloomError: there is no such file or function.
    """
    path, _, name = named.rpartition(":")
    if not path:
        raise TorchloomError(f"{named!r} names no function: write FILE.py:function")
    function = getattr(load_file(path), name, None)
    if not callable(function):
        raise TorchloomError(f"{path} has no function {name!r}: name one that is in it")
    return function


def run_script(file: Path, arguments: Sequence[str]) -> None:
    """Run a file as `python FILE ARGUMENTS` does."""
    before = sys.argv
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.resolve().parent))
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.argv = before
        sys.path.pop(0)


def interpreter() -> list[str]:
    """Return the command of a Python like this one.

    `python -c` and `python -m` import from the current folder first. If this process does not, as the
    script `torchloom` does not, its children must not either: others may be able to write to that
    folder, such as /tmp. Python 3.10 has no option for that.
    """
    imports_from_here = not {"", str(Path.cwd())}.isdisjoint(sys.path)
    if imports_from_here or sys.version_info < (3, 11):
        return [sys.executable]
    return [sys.executable, "-P"]
