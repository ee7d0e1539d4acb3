"""Workers of a benchmark, one for each rank, that answer with a line of JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _environment import worker_environment


def ask_ranks(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    cache: Path,
    timeout_s: float,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Run a script once for each rank, on loopback; return what the last lines say.

    Args:
        script: its path.
        arguments: of its command line.
        ranks: how many processes.
        cache: folder of compilers' caches.
        timeout_s: how long each may take.
        quiet: whether errors' output is dropped.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(ranks):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        environment = {
            **os.environ,
            **worker_environment(cache),
            **{name: str(value) for name, value in names.items()},
            "MASTER_ADDR": "127.0.0.1",
        }
        started.append(
            subprocess.Popen(
                [sys.executable, script, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if quiet else None,
                text=True,
            )
        )
    texts = [process.communicate(timeout=timeout_s)[0] for process in started]
    return [json.loads(text.strip().splitlines()[-1]) for text in texts]
