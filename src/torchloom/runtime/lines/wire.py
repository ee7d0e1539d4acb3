"""JSON messages over a stream, one a line."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

_MOST_BYTES = 1 << 20
_IDLE_S, _PROBE_S, _PROBES = 2, 1, 4
"""A host that cannot be reached is noticed after 2 + 4 * 1 s; a shorter break is survived."""
NO_WORD = "has ended without a word (killed, out of memory, or its host cannot be reached)"
"""What is told of a rank whose connection has ended, but for those that say goodbye."""


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._read = b""
        connection.settimeout(5.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _IDLE_S),
            ("TCP_KEEPINTVL", _PROBE_S),
            ("TCP_KEEPCNT", _PROBES),
            ("TCP_USER_TIMEOUT", 1000 * (_IDLE_S + _PROBE_S * _PROBES)),
        ):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self._socket.fileno()

    def send(self, **message: Any) -> bool:
        """Send a message; return whether the connection stands."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come, None where the connection has ended."""
        try:
            data = self._socket.recv(1 << 16)
        except (TimeoutError, InterruptedError):
            return []
        except OSError:
            return None
        if not data or len(self._read) > _MOST_BYTES:
            return None
        *lines, self._read = (self._read + data).split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return found if all(isinstance(each, dict) for each in found) else None

    def close(self) -> None:
        """End the connection."""
        self._socket.close()
