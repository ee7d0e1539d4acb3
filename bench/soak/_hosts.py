"""Two simulated hosts: network namespaces, joined by a pair of virtual devices that can be cut.

    namespace a  10.77.k.1  --- veth ---  10.77.k.2  namespace b

Ranks are started by hand, one in each, as a cluster's scheduler does. Needs root and `ip`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _runs import WORKER, SoakError
from _tree import Tree

END_S = 20.0
"""How long the ranks may take to end after the cut."""
_START_S = 240.0


@dataclass(frozen=True)
class Hosts:
    """A pair of namespaces."""

    name: str
    net: str

    def place(self, rank: int) -> str:
        """Return the namespace of a rank."""
        return f"{self.name}{'ab'[rank]}"

    def address(self, rank: int) -> str:
        """Return the address of a rank's host."""
        return f"{self.net}.{rank + 1}"

    def link(self, state: str) -> None:
        """Cut the second host off ("down"), or join it again ("up")."""
        _ip("-n", self.place(1), "link", "set", "soak", state)


def can_simulate() -> str:
    """Return why hosts cannot be simulated here; empty if they can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and the command `ip`"
    probe = f"soak{os.getpid()}probe"
    done = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"network namespaces are not allowed here: {done.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two hosts for the length of a `with` block."""
    hosts = Hosts(f"soak{os.getpid()}", f"10.77.{os.getpid() % 250}")
    try:
        for rank in range(2):
            _ip("netns", "add", hosts.place(rank))
            _ip("-n", hosts.place(rank), "link", "set", "lo", "up")
        ends = ("name", "soak", "netns", hosts.place(0)), ("name", "soak", "netns", hosts.place(1))
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for rank in range(2):
            _ip("-n", hosts.place(rank), "addr", "add", f"{hosts.address(rank)}/24", "dev", "soak")
            _ip("-n", hosts.place(rank), "link", "set", "soak", "up")
        yield hosts
    finally:
        for rank in range(2):
            subprocess.run(
                ["ip", "netns", "del", hosts.place(rank)], capture_output=True, check=False
            )


def cut_and_resume(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Train on two hosts, cut one off in the middle, join it again, train to the end.

    Returns:
        For each rank how many seconds after the cut it ended, with which code, and what it said.

    Raises:
        SoakError: the ranks hang, or do not come to the end afterwards.
    """
    tree = Tree(folder / "tmp")
    own = {**spec, "folder": str(folder)}
    try:
        with two_hosts() as hosts:
            ranks = [_start(hosts, rank, tree, own, folder / "cut") for rank in range(2)]
            _await_step(folder, spec["steps"] // 2 + 3, ranks)
            hosts.link("down")
            cut_s = time.monotonic()
            step = _step(folder)
            ended = _ended(ranks, cut_s, 3 * END_S)
            said = [_sentences(folder / f"cut-{rank}") for rank in range(2)]
            hosts.link("up")
            ranks = [_start(hosts, rank, tree, own, folder / "again") for rank in range(2)]
            codes = [rank.wait(_START_S) for rank in ranks]
            if any(codes):
                told = [(folder / f"again-{r}").read_text()[-2000:] for r in range(2)]
                raise SoakError(f"the ranks ended with {codes} after the cut: {told}")
    finally:
        tree.end()
    return {"step_of_cut": step, "ended_s": ended[0], "codes": ended[1], "said": said}


def _start(
    hosts: Hosts, rank: int, tree: Tree, spec: dict[str, Any], log: Path
) -> subprocess.Popen[bytes]:
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": hosts.address(0),
        "MASTER_PORT": "29512",
        "GLOO_SOCKET_IFNAME": "soak",
    }
    argv = ["ip", "netns", "exec", hosts.place(rank), sys.executable, str(WORKER), json.dumps(spec)]
    with log.with_name(f"{log.name}-{rank}").open("wb") as file:
        return subprocess.Popen(
            argv, stdout=file, stderr=file, env={**tree.environment(), **own}, cwd=log.parent
        )


def _await_step(folder: Path, step: int, ranks: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _START_S
    while _step(folder) < step:
        if time.monotonic() > deadline or any(rank.poll() is not None for rank in ranks):
            told = [(folder / f"cut-{r}").read_text()[-2000:] for r in range(2)]
            raise SoakError(f"the ranks did not come to step {step}: {told}")
        time.sleep(0.005)


def _step(folder: Path) -> int:
    try:
        return int((folder / "progress").read_text().split()[1])
    except (FileNotFoundError, IndexError):
        return -1


def _ended(
    ranks: list[subprocess.Popen[bytes]], since_s: float, limit_s: float
) -> tuple[list[float | None], list[int | None]]:
    """Return seconds and codes; of ranks that hang, None, and they are killed."""
    ended: list[float | None] = [None for _ in ranks]
    while None in ended and time.monotonic() - since_s < limit_s:
        for index, rank in enumerate(ranks):
            if ended[index] is None and rank.poll() is not None:
                ended[index] = round(time.monotonic() - since_s, 2)
        time.sleep(0.02)
    codes = [rank.poll() for rank in ranks]
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    return ended, codes


def _sentences(log: Path) -> list[str]:
    """Return the lines that say how a rank ended; frames of a traceback would be among them."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    host = socket.gethostname()
    return [line.replace(host, "host") for line in lines if "Error" in line or "Traceback" in line]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
