"""Ports for rendezvous that no other process takes between the choice and the use."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANDOM = random.Random()  # of its own: tests seed the global one alike, in all their processes
_FIRST = 10_000


def free_port() -> int:
    """Return a port that nobody listens at, below those that the kernel gives to whoever asks for any.

    A port of the kernel's choice is free only until the next program asks, which takes a moment where ranks
    first import torch for ten seconds.
    """
    while True:
        port = _RANDOM.randrange(_FIRST, _kernels_first())
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def _kernels_first() -> int:
    text = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(text.read_text().split()[0]) if text.exists() else 32_768
    return first if first > _FIRST + 1000 else 65_536
