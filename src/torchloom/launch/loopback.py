"""Let processes of one host meet on the loopback interface, to which no other host can connect.

torch's key-value store and gloo authenticate nobody: whoever can connect takes part. By default the store
listens on all interfaces, and gloo on the one that the host's name resolves to.
"""

from __future__ import annotations

import errno
import ipaddress
import socket

import torch.distributed as dist

from torchloom import envs
from torchloom.errors import ConfigError

ADDRESS = "127.0.0.1"
_INTERFACE = "lo"
_LAST_PORT = 65535


def is_loopback(host: str) -> bool:
    """Say whether a name or address can only stand for this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def stay_local() -> None:
    """Let gloo and NCCL of this process and its children connect over loopback, unless the user chose otherwise."""
    if any(name == _INTERFACE for _, name in socket.if_nameindex()):
        envs.set_default("GLOO_SOCKET_IFNAME", _INTERFACE)
        envs.set_default("NCCL_SOCKET_IFNAME", _INTERFACE)


def serve_store(port: int = 0, world_size: int | None = None) -> dist.TCPStore:
    """Return a store that is served by this process, on loopback alone.

    Args:
        port: where; 0 takes one that is free.
        world_size: how many processes will use it, where that is known.

    Raises:
        ConfigError: the port is taken or out of range.
    """
    if not 0 <= port <= _LAST_PORT:
        raise ConfigError(f"{port} is no port: set MASTER_PORT to one of 1 to {_LAST_PORT}")
    try:
        bound, descriptor = _listen(port)
        return dist.TCPStore(
            ADDRESS,
            bound,
            world_size,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,  # this process may serve the port already, for a group before this one
            master_listen_fd=descriptor,
        )
    except (OSError, dist.DistError) as error:
        raise ConfigError(
            f"port {port} of {ADDRESS} cannot be used for rendezvous ({error}): end the run that holds it, or "
            "set MASTER_PORT to another"
        ) from error


def _listen(port: int) -> tuple[int, int | None]:
    """Return a port and a descriptor that listens there, None where something does already."""
    try:
        listening = socket.create_server((ADDRESS, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return port, None
    return listening.getsockname()[1], listening.detach()
