"""Signals between the ranks of one arena: counted, ordered, and never waited for forever.

Each ordered pair of ranks has one semaphore per kind of signal. A signal that was sent before its
receiver came is counted, so ranks need not meet.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchloom.errors import PeerLostError
from torchloom.runtime.shm.peers import Peer
from torchloom.runtime.shm.semaphore import Semaphores

_SPINS = 200
"""Tries before sleeping, about 0.1 ms: waking up takes as long, and short waits are the rule."""
_SLICE_S = 0.1
"""How often a sleeper looks whether the rank that it waits for is still there."""


class Signal(enum.IntEnum):
    """What a rank tells another one."""

    FULL = 0
    """My slot holds my contribution."""
    FREE = 1
    """I have read your slot."""
    BARRIER = 2
    """I am here."""


@dataclass
class Link:
    """Sends and awaits signals for one rank."""

    semaphores: Semaphores
    peers: Sequence[Peer]
    rank: int
    timeout_s: float
    others: tuple[int, ...] = field(init=False)
    """The other ranks, nearest first, so that not all wait for the same one."""
    _broken: str = ""

    def __post_init__(self) -> None:
        size = len(self.peers)
        self.others = tuple((self.rank + step) % size for step in range(1, size))

    @staticmethod
    def num_semaphores(size: int) -> int:
        """Return how many semaphores a group of this size takes."""
        return len(Signal) * size * size

    def init(self, free_slots: int) -> None:
        """Set the semaphores up; on one rank, before any other uses them."""
        size = len(self.peers)
        for signal in Signal:
            for index in range(size * size):
                value = free_slots if signal is Signal.FREE else 0
                self.semaphores.init(signal * size * size + index, value)

    def send(self, signal: Signal, to: int) -> None:
        """Signal one rank; never blocks."""
        self.semaphores.post(self._index(signal, self.rank, to))

    def has(self, signal: Signal, source: int) -> bool:
        """Take a signal of a rank if it has come."""
        return self.semaphores.take(self._index(signal, source, self.rank))

    def await_(self, signal: Signal, source: int) -> None:
        """Take a signal of a rank, waiting for it.

        Raises:
            PeerLostError: the rank has ended, or did not come within the timeout.
        """
        index = self._index(signal, source, self.rank)
        take = self.semaphores.take
        for _ in range(_SPINS):
            if take(index):
                return
        self._sleep(index, source)

    def barrier(self) -> None:
        """Return when all ranks have called this as often as this rank has."""
        for peer in self.others:
            self.send(Signal.BARRIER, peer)
        for peer in self.others:
            self.await_(Signal.BARRIER, peer)

    def _sleep(self, index: int, source: int) -> None:
        if self._broken:
            raise PeerLostError(self._broken)
        deadline = time.monotonic() + self.timeout_s
        while not self.semaphores.take_within(index, _SLICE_S):
            is_alive = self.peers[source].is_alive()
            if self.semaphores.take(index):  # its last word, before it ended
                return
            who = f"rank {source} (process {self.peers[source].pid}) of this host's group"
            if not is_alive:
                self._broken = (
                    f"{who} has ended while rank {self.rank} was waiting for it: look at the "
                    "output of that rank for the cause; this run cannot go on without it"
                )
            elif time.monotonic() > deadline:
                self._broken = (
                    f"{who} did not arrive within {self.timeout_s:.0f} s: it is stuck, much "
                    "slower, or takes a branch without this collective; look at its output, or "
                    "raise the timeout of torch.distributed.init_process_group"
                )
            if self._broken:
                raise PeerLostError(self._broken)

    def _index(self, signal: Signal, source: int, target: int) -> int:
        size = len(self.peers)
        return (signal * size + source) * size + target
