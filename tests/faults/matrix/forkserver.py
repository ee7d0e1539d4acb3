"""Ranks forked from one process that has imported torch: the import is 3 of the 5 s that a rank computes.

    forks = ForkServer()          starts `python -m faults.matrix.forkserver FD` and waits for its imports
    rank = forks.start(...)       looks like a `subprocess.Popen`: pid, poll, wait, kill, returncode
    forks.close()

A forked rank leads a session of its own, so that what it leaves behind is found: its variables stand in
its `os.environ`, not in `/proc`. It ends as the interpreter ends: hooks, threads and exit handlers run.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_POLL_S = 0.01
_MAX_BYTES = 1 << 20
"""Of a message, which is the variables of a rank."""


def common_environment() -> dict[str, str]:
    """Return the variables that each rank of each case has: one thread, this package, output at once."""
    # The folder of this package's parent, whatever folder the runner was started in.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


class ForkServer:
    """The side of the runner; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "faults.matrix.forkserver", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=common_environment(),
                stdin=subprocess.DEVNULL,
            )
        self._codes: dict[int, int] = {}
        self._pids: list[int] = []

    def start(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: Path
    ) -> Forked:
        """Start one rank.

        Args:
            arguments: of `worker`.
            cwd: the folder that it runs in.
            env: all of its variables.
            output: the file that takes what it prints.

        Raises:
            RuntimeError: the server has ended.
        """
        asked = {
            "arguments": [*arguments],
            "cwd": str(cwd),
            "env": dict(env),
            "output": str(output),
        }
        with self._lock:
            with suppress(ConnectionError):
                _send(self._connection, asked)
            while not self._pids:
                self._take()
            return Forked(self, self._pids.pop())

    def code_of(self, pid: int) -> int | None:
        """Return the exit code of a rank, None while it runs."""
        with self._lock:
            while pid not in self._codes and select.select([self._connection], [], [], 0)[0]:
                self._take()
            return self._codes.get(pid)

    def close(self) -> None:
        """End the server, and with it what it has started."""
        self._connection.close()
        self._process.wait()

    def _take(self) -> None:
        said = _receive(self._connection)
        if said is None:
            raise RuntimeError(
                "the process that ranks are forked from has ended; see its output above"
            )
        if "code" in said:
            self._codes[said["pid"]] = said["code"]
        else:
            self._pids.append(said["pid"])


class Forked:
    """One forked rank, with the part of `subprocess.Popen` that the runner uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._server.code_of(self.pid)

    def wait(self) -> int:
        """Return the exit code, once it has ended."""
        while (code := self.poll()) is None:
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to a rank that has not ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _send(connection: socket.socket, value: dict[str, Any]) -> None:
    connection.send(json.dumps(value).encode())


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message; None when the other side has ended."""
    message = b""
    with suppress(ConnectionError):
        message = connection.recv(_MAX_BYTES)
    return json.loads(message) if message else None


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork as asked until the runner ends; return twice: None here, what was asked in each rank."""
    living: set[int] = set()
    while True:
        if select.select([connection], [], [], _POLL_S)[0]:
            asked = _receive(connection)
            if asked is None:
                for pid in living:
                    os.kill(pid, signal.SIGKILL)
                return None
            pid = os.fork()
            if not pid:
                return asked
            living.add(pid)
            _send(connection, {"pid": pid})
        while living:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            living.remove(pid)
            _send(connection, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _become(asked: dict[str, Any]) -> None:
    """Turn the forked process into what a started one would be."""
    os.setsid()
    os.chdir(asked["cwd"])
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None  # of the server's variables
    sys.argv[1:] = asked["arguments"]


def _main() -> None:
    import torch._inductor.compile_fx  # noqa: F401

    import torchloom.engine  # noqa: F401
    from faults.matrix import worker

    connection = socket.socket(fileno=int(sys.argv[1]))
    asked = _serve(connection)
    connection.close()
    if asked is not None:
        _become(asked)
        worker.main()


if __name__ == "__main__":
    _main()
