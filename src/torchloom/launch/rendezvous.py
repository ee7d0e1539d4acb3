"""Lets the ranks meet within a time limit, or raises an error that names the missing ones and the reason.

    resolve the address -> rank 0 opens a store there, others reach it -> each rank says that it is
    here -> all are here, or the missing ones are named

`torch.distributed`'s own rendezvous waits as long as a collective may take, and does not name the
missing ranks. Its key-value store and gloo authenticate nobody: whoever can connect takes part. By default the store
listens on all interfaces, and gloo on the one that the host's name resolves to; ranks of one host stay on loopback.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchloom import envs
from torchloom._torch.distributed import hushed_store
from torchloom.errors import ConfigError, PeerLostError, first_line
from torchloom.log import get_logger

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


logger = get_logger(__name__)

RENDEZVOUS_S = 120.0
"""How long ranks wait for each other to come; as long as they may lag behind later (agreement).

DeepSpeed and torch take the limit of collectives for this too (10 minutes).
"""
_RESOLVE_S = 8.0
"""How long a name may take to appear: name services of clusters lag behind their hosts."""
_QUIET_S = 10.0
"""How long to wait before saying for whom."""

_TURN_S = 0.5
"""How often a rank that waits looks who has come, and whether it waits for nothing."""
_MOST_REFUSED = 5
"""How often what listens at the address may hang up before it is taken for no store at all."""
_CLASH = "clash"
"""Where a process that can never be part of the run says why."""

_MEETINGS = itertools.count()


@hushed_store()
def meet(launch: envs.Launch, place: envs.Meeting, limit_s: float = RENDEZVOUS_S) -> Any:
    """Return a key-value store that all ranks have come to.

    Args:
        launch: who this process is.
        place: where to meet.
        limit_s: how long ranks may take to come.

    Raises:
        ConfigError: the address or the port cannot be used, or ranks hold the same number.
        PeerLostError: some ranks did not come within the limit.
    """
    deadline = time.monotonic() + limit_s
    serial = next(_MEETINGS)
    store = _reach(launch, place, deadline, serial)
    try:
        _claim(store, launch, place)
        _await_all(store, launch, place, limit_s, deadline)
    except ConfigError as error:
        with contextlib.suppress(dist.DistError):
            store.set(_CLASH, str(error))  # no use for the others to wait
        if launch.rank == 0:
            time.sleep(2 * _TURN_S)  # the store goes with this process
        raise
    except dist.DistError as error:
        raise PeerLostError(
            f"rank {launch.rank} lost the store at {_at(place)} while the ranks were meeting "
            f"({first_line(error)}): look at the output of rank 0"
        ) from None
    return dist.PrefixStore("group", store)


def _reach(launch: envs.Launch, place: envs.Meeting, deadline: float, serial: int) -> Any:
    """Return the store of this meeting; for ranks but 0, once rank 0 has said there how many ranks there are.

    A rank that is ahead of rank 0 finds the store of the meeting before, which rank 0 still serves. That
    goes without a word of this meeting, and the rank looks for the next.
    """
    num_refused = 0
    while True:
        try:
            store = _open(launch, place, deadline, is_first=serial == 0)
        except dist.DistNetworkError as error:
            num_refused += 1
            if num_refused == _MOST_REFUSED:
                raise _unusable(launch, place, first_line(error)) from None
            time.sleep(0.1)
            continue
        # A store of the launcher outlives the ranks, and one process may meet several times.
        store = dist.PrefixStore(f"torchloom/world/{place.attempt}/{serial}", store)
        if launch.rank == 0:
            return store
        try:
            store.wait(["world_size"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except dist.DistStoreError:
            pass  # rank 0 is among those that did not come
        except dist.DistNetworkError:
            if not place.is_hosted and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
        return store


def _open(launch: envs.Launch, place: envs.Meeting, deadline: float, *, is_first: bool) -> Any:
    """Open the store at the address, or reach the one that rank 0 or the launcher has opened."""
    is_host = _is_host(launch, place)
    _await_address(launch, place, deadline)
    if is_host and is_first:  # later, the port may be held by a store of this very process
        _check_port_is_free(place.port)
    limit_s = max(1.0, deadline - time.monotonic())
    found: list[Any] = []

    @hushed_store()  # of its own: the thread may outlast the meeting
    def run() -> None:
        try:
            if is_host and is_loopback(place.host):
                store = serve_store(place.port, launch.world_size)
            else:
                store = dist.TCPStore(
                    place.host,
                    place.port,
                    launch.world_size,
                    is_master=is_host,
                    timeout=timedelta(seconds=limit_s),
                    wait_for_workers=False,
                    multi_tenant=is_host,
                )
            found.append(store)
        except (RuntimeError, ValueError, OSError) as error:
            found.append(error)

    # torch waits without a limit for a program that listens at the port and never answers.
    thread = threading.Thread(target=run, name="torchloom-rendezvous", daemon=True)
    thread.start()
    thread.join(limit_s)
    store = found.pop() if found else None
    if isinstance(store, dist.TCPStore):
        return store
    if isinstance(store, dist.DistNetworkError):
        raise store
    why = f"no answer within {limit_s:.0f} s" if store is None else first_line(store)
    raise _unusable(launch, place, why)


def _is_host(launch: envs.Launch, place: envs.Meeting) -> bool:
    """Say whether this process opens the store."""
    return launch.rank == 0 and not place.is_hosted


def _unusable(launch: envs.Launch, place: envs.Meeting, why: str) -> ConfigError:
    reason = "cannot be opened on this host" if _is_host(launch, place) else "is not that of rank 0"
    return ConfigError(
        f"the store at {_at(place)} {reason} ({why}): set MASTER_ADDR to the host of rank 0 and "
        "MASTER_PORT to a port that is free there, equal on every rank"
    )


def _check_port_is_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"rank 0 cannot open port {port} on this host ({error.strerror}): another program, "
                "perhaps an earlier run, holds it; end that, or set MASTER_PORT to a free port, "
                "equal on every rank"
            ) from None


def _await_address(launch: envs.Launch, place: envs.Meeting, deadline: float) -> None:
    """Wait until the address has a meaning and, where this process does not open the store, something answers."""
    started, told = time.monotonic(), False
    while True:
        waited_s, left_s = time.monotonic() - started, deadline - time.monotonic()
        try:
            if _is_host(launch, place):
                socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
            else:
                address = (place.host, place.port)
                socket.create_connection(address, max(0.1, min(5.0, left_s))).close()
            return
        except (socket.gaierror, UnicodeError) as error:
            if waited_s >= _RESOLVE_S or left_s <= 0:
                raise ConfigError(
                    f"MASTER_ADDR={place.host!r} is no address that this host knows ({error}): "
                    "set it to the host of rank 0, for ranks of one host to 127.0.0.1"
                ) from None
        except OSError as error:
            if left_s <= 0:
                whose = "the launcher" if place.is_hosted else "rank 0"
                raise PeerLostError(
                    f"rank {launch.rank} of {launch.world_size} could not reach {whose} at "
                    f"{_at(place)} within {waited_s:.0f} s ({error}): look at "
                    "its output for an error, and check MASTER_ADDR and MASTER_PORT"
                ) from None
        if not told and waited_s > _QUIET_S:
            told = True
            logger.warning("rank %d still tries to reach rank 0 at %s", launch.rank, _at(place))
        time.sleep(0.1)


def _claim(store: Any, launch: envs.Launch, place: envs.Meeting) -> None:
    """Say that this rank is here, and that no other process is."""
    if launch.rank == 0:
        store.set("world_size", str(launch.world_size))
    elif store.check(["world_size"]):  # else rank 0 is among those that did not come
        held = store.get("world_size").decode()
        if held != str(launch.world_size):
            raise ConfigError(
                f"rank {launch.rank} was told that there are {launch.world_size} ranks, rank 0 that "
                f"there are {held}: set WORLD_SIZE to the same number on every rank"
            )
    own = f"process {os.getpid()} on {socket.gethostname()}"
    held = store.compare_set(f"is/{launch.rank}", "", own).decode()
    if held != own:
        raise ConfigError(
            f"two processes are rank {launch.rank} of the run at {_at(place)}: {held} and {own}; "
            "give each process a RANK of its own, and each run a MASTER_PORT of its own"
        )
    store.set(str(launch.rank), "here")


def _await_all(
    store: Any, launch: envs.Launch, place: envs.Meeting, limit_s: float, deadline: float
) -> None:
    """Wait until all are here; by turns, so that it is known who is not."""
    missing = [*range(launch.world_size)]
    told_at = time.monotonic() + _QUIET_S
    try:
        while missing and (left := deadline - time.monotonic()) > 0:
            try:
                store.wait([str(rank) for rank in missing], timedelta(seconds=min(_TURN_S, left)))
                return
            except dist.DistStoreError:
                missing = [rank for rank in missing if not store.check([str(rank)])]
            if store.check([_CLASH]):
                raise ConfigError(store.get(_CLASH).decode())
            if launch.rank == 0 and time.monotonic() > told_at:
                logger.warning("still waiting for ranks %s of %d", missing, launch.world_size)
                told_at = deadline
        reason = f"did not come to {_at(place)} within {limit_s:.0f} s"
    except dist.DistError:
        reason = f"had not come to {_at(place)} when the store there went, with its host"
    if missing:
        raise PeerLostError(
            f"ranks {missing} of {launch.world_size} {reason}: start them, look at their output "
            "for an error, or correct WORLD_SIZE"
        )


def _at(place: envs.Meeting) -> str:
    return f"{place.host}:{place.port}"
