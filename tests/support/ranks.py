"""Ranks as forked processes, each of one test's own.

A fork inherits everything that is imported, so a test on two ranks starts in a tenth of a second,
and the function may be a closure. The parent never makes a process group. That its children can run
backward is seen to in `conftest.py`. `support.pool` has ranks that several tests share, which are cheaper
where they compile.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import pickle
import selectors
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from support.ports import free_port


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 180.0
) -> list[Any]:
    """Call `fn(rank, *args)` on every rank of a fresh gloo group; return the results by rank.

    The first failure stops all ranks and is raised with its traceback.
    """
    port = free_port()
    pipes, pids = [], []
    for rank in range(world_size):
        read_end, write_end = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12+: fork with threads
            pid = os.fork()
        if pid == 0:
            os.close(read_end)
            _child(rank, world_size, port, write_end, fn, args)
        os.close(write_end)
        pipes.append(read_end)
        pids.append(pid)
    try:
        return _collect(pipes, timeout_s)
    except TimeoutError:
        show_stacks(pids)
        raise
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _child(
    rank: int, world_size: int, port: int, write_end: int, fn: Callable[..., Any], args: Any
) -> None:
    status = 1
    gc.freeze()  # a collection would write to, and so copy, every page of objects of the parent
    try:
        print_stack_on_signal()
        torch.set_num_threads(1)
        torch._dynamo.reset()  # what the parent compiled counts toward limits of recompiling
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group(
            "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        dist.barrier()  # a rank whose function ends the group would cut off one that still connects
        _send(write_end, ("ok", fn(rank, *args)))
        status = 0
    except BaseException:  # noqa: BLE001  the parent raises it
        _send(write_end, ("error", f"rank {rank}\n{traceback.format_exc()}"))
    finally:
        os.close(write_end)
        # Wait to be killed: a rank that left early would look like a fault to its peers.
        time.sleep(600)
        os._exit(status)


def print_stack_on_signal() -> None:
    """Let this process print where each of its threads is, when `show_stacks` asks."""
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)


def show_stacks(pids: list[int]) -> None:
    """Let ranks that hang print where they are, to the standard error that pytest shows."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR2)
        time.sleep(0.5)  # one text after the other


def pack(value: Any) -> bytes:
    """Return a result as bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return what `pack` was given."""
    return torch.load(io.BytesIO(data), weights_only=False)


def _send(write_end: int, message: Any) -> None:
    with os.fdopen(os.dup(write_end), "wb") as stream:
        pickle.dump(pack(message), stream)


def _collect(pipes: list[int], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    selector = selectors.DefaultSelector()
    chunks: dict[int, bytearray] = {pipe: bytearray() for pipe in pipes}
    for pipe in pipes:
        selector.register(pipe, selectors.EVENT_READ)
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = selector.select(max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank, pipe in enumerate(pipes) if pipe not in results]
            raise TimeoutError(f"ranks {missing} did not finish within {timeout_s:.0f} s")
        for key, _ in ready:
            data = os.read(key.fd, 1 << 20)
            if data:
                chunks[key.fd] += data
                continue
            selector.unregister(key.fd)
            os.close(key.fd)
            if not chunks[key.fd]:
                raise AssertionError(f"rank {pipes.index(key.fd)} died without a word")
            kind, value = unpack(pickle.loads(chunks[key.fd]))
            if kind == "error":
                raise AssertionError(value)
            results[key.fd] = value
    return [results[pipe] for pipe in pipes]
