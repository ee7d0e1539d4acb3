"""Ranks that outlive a test: processes with a compiler that is warm, for one test function after another.

A forked rank meets a compiler that has compiled nothing yet: a training step through `aot_eager` takes it
2.3 s of CPU, the second one 0.7 s; through Inductor 5.7 s and 1.8 s (torch 2.13, code already cached). These
ranks pay that once. They are started as new processes, not forked: under a CUDA build of torch a forked
process may not be able to run backward.

`run_ranks` here takes what `support.ranks.run_ranks` takes. Between two functions a rank forgets what
`support.fresh` lists, and has a gloo group of its own for each. A world takes the first of them, and starts
those that are missing. Where a rank failed, hung or cannot be made fresh, all are replaced.

A test needs ranks of its own (`support.ranks`) that kills them or is about their end, changes limits of the
process or patches a module before it starts them, counts memory, descriptors, threads or children, forks, or
has more ranks than there are here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from support import carry, ranks
from support.ports import free_port

MOST_RANKS = 2
_MOST_CALLS = 200
"""Functions until ranks are replaced: what torch keeps of each graph adds up."""
_END_S = 5.0
_START = "import sys; sys.path[:] = {path!r}; from support.pool_worker import main; main({fd})"

_POOL: list[Rank] = []


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 180.0
) -> list[Any]:
    """Call `fn(rank, *args)` on every rank of a fresh gloo group; return the results by rank.

    The first failure is raised with its traceback, and ends all ranks.

    Args:
        world_size: from one to `MOST_RANKS`; more get ranks of their own.
        fn: what each rank calls; a closure may hold anything that can be pickled.
        args: its further arguments.
        timeout_s: how long all of it may take, in seconds.

    Raises:
        AssertionError: a rank failed.
        TimeoutError: a rank did not finish in time.
        TypeError: the function cannot be sent to another process.
    """
    if world_size > MOST_RANKS:
        return ranks.run_ranks(world_size, fn, *args, timeout_s=timeout_s)
    task = carry.dumps((fn, args))
    if any(each.num_calls >= _MOST_CALLS or not each.is_fresh() for each in _POOL):
        close()
    _POOL.extend(Rank(number) for number in range(len(_POOL), world_size))
    try:
        return _call(_POOL[:world_size], task, timeout_s)
    except BaseException:
        close()  # also where a test's own limit has struck
        raise


def close() -> None:
    """End the ranks, if there are any."""
    for each in _POOL:
        each.end()
    for each in _POOL:
        each.wait()
    _POOL.clear()


def cpu_s() -> float:
    """Return the CPU time that living ranks have taken, in seconds."""
    ticks = 0
    for each in _POOL:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{each.process.pid}/stat").read_text()
            ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Rank:
    """One process."""

    def __init__(self, number: int) -> None:
        self.number, self.num_calls = number, 0
        self._connection, theirs = socket.socketpair()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by `wait`
        with theirs:
            start = _START.format(path=[*sys.path], fd=theirs.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-c", start],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
        self._cleaned = True

    def fileno(self) -> int:
        """Return the descriptor of the connection, for selectors."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Hand the process something to do."""
        data = pickle.dumps(message)
        self._connection.sendall(len(data).to_bytes(8, "little") + data)

    def receive(self) -> Any:
        """Return its next message; None when it has ended."""
        with contextlib.suppress(ConnectionError):
            size = self._read(8)
            data = self._read(int.from_bytes(size, "little")) if size else b""
            return pickle.loads(data) if data else None
        return None

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            data = self._connection.recv(min(size - len(found), 1 << 20))
            if not data:
                return b""
            found += data
        return bytes(found)

    def clean(self) -> None:
        """Let it forget the function; its peer has finished too."""
        self._cleaned = False
        self.send({"do": "clean"})

    def is_fresh(self) -> bool:
        """Return whether it can take another function."""
        if not self._cleaned:
            said = self.receive()
            self._cleaned = said == ("clean", "")
            if not self._cleaned:
                print(f"rank {self.number} of the pool is replaced, with its peers: {said}")
        return self._cleaned and self.process.poll() is None

    def printed(self) -> str:
        """Return what it printed since it was last asked."""
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        self._output.seek(0)
        self._output.truncate()
        return text

    def end(self) -> None:
        """Tell it to end."""
        self._connection.close()
        self.process.kill()

    def wait(self) -> None:
        """Wait for its end."""
        self.process.wait(_END_S)
        self._output.close()


def _call(world: list[Rank], task: bytes, timeout_s: float) -> list[Any]:
    filters = [(a, _text(m), c, _text(where), line) for a, m, c, where, line in warnings.filters]
    message = {
        "do": "run",
        "task": task,
        "port": free_port(),
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "filters": filters,
    }
    for each in world:
        each.num_calls += 1
        each.send({**message, "rank": each.number, "world_size": len(world)})
    try:
        results = _collect(world, timeout_s)
    except TimeoutError:
        ranks.show_stacks([each.process.pid for each in world])
        raise
    finally:
        for each in world:
            if text := each.printed():
                print(text)
    for each in world:
        each.clean()
    return results


def _text(pattern: Any) -> str:
    return getattr(pattern, "pattern", pattern) or ""


def _collect(world: list[Rank], timeout_s: float) -> list[Any]:
    deadline_s = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    with selectors.DefaultSelector() as selector:
        for each in world:
            selector.register(each, selectors.EVENT_READ, each)
        while len(results) < len(world):
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                missing = [each.number for each in world if each.number not in results]
                raise TimeoutError(f"ranks {missing} did not finish within {timeout_s:.0f} s")
            for key, _ in ready:
                rank = key.data
                selector.unregister(rank)
                results[rank.number] = _result_of(rank)
    return [results[each.number] for each in world]


def _result_of(rank: Rank) -> Any:
    said = rank.receive()
    if said is None:
        raise AssertionError(f"rank {rank.number} died without a word")
    kind, value = said
    if kind == "error":
        raise AssertionError(value)
    return ranks.unpack(value)
