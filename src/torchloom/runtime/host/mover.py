"""Copies tensors between one device and its host memory, beside compute, and counts what was copied.

Two engines, one per direction, work off copies in order: a background thread on a CPU, a stream on a GPU. `begin_*`
issues a copy and returns its results at once; `wait` makes them valid. The mover of a device is made at its
first use and lives as long as the process.

Nothing is gained by threads on a CPU alone, where both pools are the same memory. They make every offload path truly
asynchronous in tests: what a GPU could read or free too early, the threads can.

A stream's copy begins after what the compute stream was given before it; `finish` lets the compute stream
wait for it, without blocking the host. Memory needs no `record_stream`: the graph keeps both sides
of a copy until its wait, and what the compute stream does after a wait comes after the copy.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from torchloom._torch.modes import is_traced
from torchloom.errors import MoveError
from torchloom.ops.replays import never
from torchloom.runtime.base import Pending, note_pending, wait_for_results
from torchloom.runtime.host.arena import Account, Direction, HostArena, charged_account

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(source, destination) of copies that belong together."""


Ticket = Callable[[], object]
"""Makes the results of copies under way valid for what comes after, and raises what they raised."""


class ThreadEngine:
    """Copies in the background, one batch after the other; the thread starts with the first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, pairs: Pairs) -> Ticket:
        """Begin to copy each source into its destination."""
        if self._thread is None:
            # One thread of torch's: copies must not take the compute's cores.
            self._thread = ThreadPoolExecutor(
                1, f"torchloom-{self.name}", torch.set_num_threads, (1,)
            )
        return self._thread.submit(copy_all, list(pairs)).result

    def stop(self) -> None:
        """Finish what is queued and end the thread; a later `begin` starts a new one."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


@torch.no_grad()
def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each source into its destination, and let go of both: who waits may count on the memory being free."""
    try:
        while pairs:
            source, destination = pairs.pop(0)
            destination.copy_(source)
    finally:
        pairs.clear()


class StreamEngine:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self, pairs: Pairs) -> Ticket:
        """Begin to copy each source into its destination."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            for source, destination in pairs:
                destination.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        held, device = list(pairs), self._device  # held until the compute stream waits for them

        def finish() -> None:
            torch.cuda.current_stream(device).wait_event(event)
            held.clear()

        return finish

    def stop(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()


CopyEngine = ThreadEngine | StreamEngine
"""Copies in one direction, in order, beside compute."""


@dataclass(frozen=True)
class MoveStats:
    """What a device, or one engine on it, has moved, and its memory on the host; all in bytes."""

    host_bytes: int
    """In use on the host now."""
    host_peak_bytes: int
    """Most that was in use on the host at a time."""
    host_reserved_bytes: int
    """Host memory that the device's arena holds, in use or not; engines share it."""
    offloaded_bytes: int
    """Copied to the host so far."""
    reloaded_bytes: int
    """Copied to the device so far."""
    in_flight_peak_bytes: int
    """Most that was under way at a time, from start to wait, both directions together."""


@dataclass
class Mover:
    """Copies tensors of one device to host memory and back."""

    device: torch.device
    arena: HostArena
    engines: dict[Direction, CopyEngine]

    def begin_offload(self, sources: Sequence[Tensor], *, pin: bool = True) -> list[Tensor]:
        """Begin to copy tensors into host memory; `wait` makes the results valid."""
        hosts = [self.arena.empty_like(source, pin=pin) for source in sources]
        self._note(hosts, self.begin_copy("to_host", list(zip(sources, hosts, strict=True))), hosts)
        return hosts

    def begin_reload(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        """Begin to copy tensors of host memory to the device; `wait` makes the results valid."""
        results = [torch.empty_like(host, device=self.device) for host in hosts]
        ticket = self.begin_copy("to_device", list(zip(hosts, results, strict=True)))
        self._note(results, ticket, hosts)
        return results

    def fetch(self, host: Tensor) -> Tensor:
        """Return a copy of a tensor of host memory on the device, valid at once."""
        results = self.begin_reload([host])
        self.wait(results)
        return results[0]

    def begin_copy(self, direction: Direction, pairs: Pairs) -> Ticket:
        """Begin copies into memory that the caller owns; calling the ticket makes them valid.

        Args:
            direction: which engine copies.
            pairs: (source, destination), neither of which may change or die before it is called.
        """
        never("it copies between the device and host memory")
        for source, destination in pairs:
            self._total.moved[direction] += source.nbytes
            account = self._account_of(destination if direction == "to_host" else source)
            if account is not None:
                account.moved[direction] += source.nbytes
        return self.engines[direction].begin(
            [(self._plain(source), self._plain(destination)) for source, destination in pairs]
        )

    def _plain(self, tensor: Tensor) -> Tensor:
        """Return a side of a copy without autograd, host memory as the CPU's."""
        tensor = tensor.detach()
        if self.device.type == "cpu" or tensor.device.type == "cpu":
            return tensor
        return self.arena.host_alias(tensor) if self.arena.owns(tensor) else tensor

    def wait(self, results: Sequence[Tensor]) -> None:
        """Make the results of one `begin_*` call valid; see `wait_for_results`."""
        wait_for_results(results)

    def stats(self, account: Account | None = None) -> MoveStats:
        """Return the running totals of an account, default: of all that this process has moved."""
        found, used = account or self._total, self.arena.used_bytes  # buries what has died
        return MoveStats(
            host_bytes=used if account is None else found.used,
            host_peak_bytes=found.peak,
            host_reserved_bytes=self.arena.reserved_bytes,
            offloaded_bytes=found.moved["to_host"],
            reloaded_bytes=found.moved["to_device"],
            in_flight_peak_bytes=found.in_flight_peak,
        )

    @property
    def _total(self) -> Account:
        return self.arena.total

    def _account_of(self, host: Tensor) -> Account | None:
        """Return whose a copy is: of the engine that took the host memory, or is at work."""
        return self.arena.account_of(host) or charged_account()

    def _note(self, results: Sequence[Tensor], ticket: Ticket, hosts: Sequence[Tensor]) -> None:
        nbytes, account = sum(each.nbytes for each in results), self._account_of(hosts[0])

        def finish() -> None:
            self._fly(-nbytes, account)
            ticket()

        self._fly(nbytes, account)
        note_pending(results, Pending(finish, drop=lambda: self._fly(-nbytes, account)))

    def _fly(self, num_bytes: int, account: Account | None) -> None:
        self._total.fly(num_bytes)
        if account is not None:
            account.fly(num_bytes)


_MOVERS: dict[torch.device, Mover] = {}
_lock = threading.Lock()


def mover_of(device: torch.device) -> Mover:
    """Return the mover of a device, made at the first call."""
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    with _lock:
        if device not in _MOVERS:
            _MOVERS[device] = Mover(device, HostArena(device), _engines(device))
        return _MOVERS[device]


def is_on_host(tensor: Tensor) -> bool:
    """Say whether a tensor lives in the host memory of some mover."""
    # Tensors of a simulation have no memory.
    return not is_traced([tensor]) and any(mover.arena.owns(tensor) for mover in _MOVERS.values())


def loaded(tensor: Tensor) -> Tensor:
    """Return a tensor that can be sent: on its device, where it waits on the host."""
    return mover_of(tensor.device).fetch(tensor) if is_on_host(tensor) else tensor


def move_stats(device: torch.device | None = None) -> MoveStats:
    """Return what a device has moved so far; zeros if nothing ever moved.

    Args:
        device: default: the CPU.
    """
    return mover_of(device or torch.device("cpu")).stats()


def _engines(device: torch.device) -> dict[Direction, CopyEngine]:
    if device.type == "cuda":
        return {"to_host": StreamEngine(device), "to_device": StreamEngine(device)}
    if device.type == "cpu":
        return {"to_host": ThreadEngine("to_host"), "to_device": ThreadEngine("to_device")}
    raise MoveError(
        f"tensors of a {device.type!r} device cannot be offloaded: only cuda and cpu are supported"
    )


@atexit.register
def _stop() -> None:
    """End the threads before the interpreter goes: one that wakes up later would find no GIL."""
    for mover in _MOVERS.values():
        for engine in mover.engines.values():
            engine.stop()


os.register_at_fork(after_in_child=_MOVERS.clear)  # a child has none of its parent's threads
