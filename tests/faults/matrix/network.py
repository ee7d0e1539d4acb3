"""Two network namespaces joined by a pair of interfaces: two hosts, as far as ranks can tell."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_SERIALS = itertools.count()


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    interface: str
    address: str

    def head(self) -> list[str]:
        """Return what runs a command on this host."""
        return ["ip", "netns", "exec", self.name]

    def environment(self, master: Host) -> dict[str, str]:
        """Return what a rank on this host is told."""
        return {
            "MASTER_ADDR": master.address,
            "GLOO_SOCKET_IFNAME": self.interface,
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
        }

    def set_link(self, state: str) -> None:
        """Take the link "down", or bring it "up"."""
        _ip("-n", self.name, "link", "set", self.interface, state)

    def lose_packets(self, to: Host) -> None:
        """Let what this host sends to another one vanish, with the link up: nobody is told.

        The packets go to a hardware address that nobody has.
        """
        nobody = "02:00:00:00:00:99"
        _ip("-n", self.name, "neigh", "replace", to.address, "lladdr", nobody,
            "dev", self.interface, "nud", "permanent")  # fmt: skip


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts for the length of a `with` block.

    Raises:
        PermissionError: this process may not make network namespaces.
    """
    if shutil.which("ip") is None:
        raise PermissionError("there is no command `ip` (package iproute2)")
    serial = next(_SERIALS)
    unique, net = f"{os.getpid() % 100_000}n{serial}", (os.getpid() + serial) % 250
    hosts = tuple(
        Host(f"faults{unique}{side}", f"v{unique}{side}", f"10.213.{net}.{index}")
        for index, side in enumerate("ab", start=1)
    )
    try:
        _make(hosts[0], hosts[1])
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            with suppress(PermissionError):
                _ip("netns", "del", host.name)


def _make(one: Host, other: Host) -> None:
    for host in (one, other):
        _ip("netns", "add", host.name)
    _ip("-n", one.name, "link", "add", one.interface, "type", "veth",
        "peer", "name", other.interface, "netns", other.name)  # fmt: skip
    for host in (one, other):
        _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
        _ip("-n", host.name, "link", "set", host.interface, "up")
        _ip("-n", host.name, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
