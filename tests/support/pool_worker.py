"""One rank of the pool: takes functions from a connection until it ends. See `support.pool`."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import traceback
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from support import carry, fresh, ranks

_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


def main(descriptor: int) -> None:
    """Serve until the process that runs the tests is gone."""
    ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)
    ranks.print_stack_on_signal()
    connection = socket.socket(fileno=descriptor)
    state = fresh.State()
    while (message := _receive(connection)) is not None:
        if message["do"] == "run":
            _send(connection, _run(message))
        else:
            _send(connection, ("clean", state.restore()))
    os._exit(0)


def _run(message: dict[str, Any]) -> tuple[str, Any]:
    rank, size = message["rank"], message["world_size"]
    try:
        os.environ.clear()
        os.environ.update(message["environment"])
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(message["port"]))
        os.chdir(message["folder"])
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for action, text, category, module, line in reversed(message["filters"]):
                warnings.filterwarnings(action, text, category, module, line)
            dist.init_process_group(
                "gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60)
            )
            fn, args = carry.loads(message["task"])
            return "ok", ranks.pack(fn(rank, *args))
    except BaseException:  # noqa: BLE001  the process that runs the tests raises it
        return "error", f"rank {rank}\n{traceback.format_exc()}"


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    size = connection.recv(8, socket.MSG_WAITALL)
    if len(size) < 8:
        return None
    data = connection.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
    return pickle.loads(data)


def _send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(len(data).to_bytes(8, "little") + data)


torch.set_num_threads(1)
