"""A running arm as the driver sees it: one worker process per rank, spoken to in JSON lines."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from arms import Arm

_WORKER = Path(__file__).with_name("_worker.py")


class ArmError(Exception):
    """The arm cannot go on; the message is what the table shows."""


class Group:
    """The worker processes of one arm, alive until `close`."""

    def __init__(
        self,
        arm: Arm,
        *,
        batch: int,
        world_size: int,
        log_dir: Path,
        environment: Mapping[str, str],
        accumulation: int = 1,
        allocator: Path | None = None,
        shape: Mapping[str, int] | None = None,
    ) -> None:
        self.arm = arm
        log_dir.mkdir(parents=True, exist_ok=True)
        spec = {
            "module": arm.module,
            "options": dict(arm.options),
            "batch": batch,
            "world_size": world_size,
            "accumulation": accumulation,
            "allocator": str(allocator) if allocator else None,
            "shape": dict(shape or {}),
        }
        port = _free_port()
        self._logs = [
            (log_dir / f"{arm.name}-batch{batch}-rank{rank}.log").open("w")
            for rank in range(world_size)
        ]
        self._processes = [
            _start({**spec, "rank": rank}, port, self._logs[rank], environment)
            for rank in range(world_size)
        ]

    def ask(self, command: Mapping[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
        """Send `command` to every rank and return their answers in rank order.

        Raises:
            ArmError: a rank failed, left, or did not answer in time.
        """
        line = json.dumps(command) + "\n"
        for process in self._processes:
            self._send(process, line)
        return self._answers(time.monotonic() + timeout_s)

    def close(self) -> None:
        """End the workers; they have a moment to leave by themselves."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        for log in self._logs:
            log.close()

    def _send(self, process: subprocess.Popen[str], line: str) -> None:
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError as error:
            raise ArmError(self._left(process)) from error

    def _answers(self, deadline: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes):
                ready = selector.select(timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise ArmError("a rank did not answer in time")
                for key, _ in ready:
                    answers[key.data] = self._read(self._processes[key.data])
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in sorted(answers)]

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        line = process.stdout.readline()
        if not line:
            raise ArmError(self._left(process))
        answer = json.loads(line)
        for key in ("unavailable", "error"):
            if key in answer:
                raise ArmError(answer[key])
        return answer

    def _left(self, process: subprocess.Popen[str]) -> str:
        try:
            code = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "a rank closed its output"
        return f"a rank left with exit status {code}"


def _start(
    spec: Mapping[str, Any], port: int, log: TextIO, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    rank, world_size = spec["rank"], spec["world_size"]
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, str(_WORKER), json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={
            **os.environ,
            **environment,
            "MASTER_ADDR": "127.0.0.1",
            **{name: str(value) for name, value in ranks.items()},
        },
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
