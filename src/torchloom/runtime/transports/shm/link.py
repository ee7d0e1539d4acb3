"""Signals between the ranks of one arena: counted, ordered, and never waited for forever.

Each ordered pair of ranks has one semaphore per kind of signal. A signal that was sent before its
receiver came is counted, so ranks need not meet. A semaphore is also the memory barrier of what it announces: whoever
has waited sees everything that was written before the post (POSIX, "Memory Synchronization").
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ShardError, TorchloomError
from torchloom.position import POSITION, Verdict, Wait
from torchloom.runtime.channel import Channel, NamedCollective
from torchloom.runtime.lines import explained
from torchloom.runtime.transports.shm.arena import ALIGNMENT, Arena, Peer

NBYTES = 64
"""One semaphore per cache line; `sem_t` has 32 bytes or fewer on 64-bit Linux."""

_SHARED_BETWEEN_PROCESSES = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Semaphores:
    """A row of counting semaphores, `NBYTES` each, in a tensor of shared bytes."""

    def __init__(self, memory: Tensor) -> None:
        # Calls that cannot block keep the interpreter's lock; one that sleeps must not.
        quick, blocking = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        self._memory, self._address = memory, memory.data_ptr()
        self._post = _typed(quick.sem_post)
        self._try = _typed(quick.sem_trywait)
        self._init = _typed(quick.sem_init, ctypes.c_int, ctypes.c_uint)
        clock = _typed(blocking.sem_timedwait, ctypes.POINTER(_Timespec))
        self._sleep, self._clock = clock, time.CLOCK_REALTIME

    def init(self, index: int, value: int) -> None:
        """Set a semaphore up, once, in one process."""
        if self._init(self._at(index), _SHARED_BETWEEN_PROCESSES, value):
            raise OSError(ctypes.get_errno(), "sem_init failed")

    def post(self, index: int) -> None:
        """Add one."""
        if self._post(self._at(index)):
            raise OSError(ctypes.get_errno(), "sem_post failed")

    def take(self, index: int) -> bool:
        """Subtract one if there is one."""
        return not self._try(self._at(index))

    def take_within(self, index: int, timeout_s: float) -> bool:
        """Subtract one, asleep until there is one or the time is up."""
        until = time.clock_gettime(self._clock) + timeout_s
        seconds = int(until)
        deadline = _Timespec(seconds, int((until - seconds) * 1e9))
        if not self._sleep(self._at(index), ctypes.byref(deadline)):
            return True
        code = ctypes.get_errno()
        if code not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))
        return False

    def _at(self, index: int) -> int:
        return self._address + index * NBYTES


def _typed(function: Any, *rest: Any) -> Any:
    function.argtypes = (ctypes.c_void_p, *rest)
    function.restype = ctypes.c_int
    return function


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


_LONGEST_S = 3600.0
"""Where nobody judges (there is no line to rank 0), a wait ends in any case."""


class Link:
    """Sends and awaits signals for one rank.

    Beside its signals a rank leaves marks: numbers that say what it has come to. Ranks that run
    different programs find other marks than their own, which is an error, not a wrong result.
    """

    def __init__(
        self, arena: Arena, peers: Sequence[Peer], rank: int, channel: Channel, num_slots: int
    ) -> None:
        size = len(peers)
        num_semaphores = len(Signal) * size * size
        self.peers, self.rank, self.channel = peers, rank, channel
        channel.polls_verdict = True
        self.timeout_s = _LONGEST_S
        self.others = tuple((rank + step) % size for step in range(1, size))
        """The other ranks, nearest first, so that not all wait for the same one."""
        self._num_slots = num_slots
        self._semaphores: Semaphores | None = Semaphores(
            arena.tensor(0, num_semaphores * NBYTES, torch.uint8)
        )
        self._marks: memoryview | None = arena.words(num_semaphores * NBYTES, size * num_slots)

    @staticmethod
    def control_bytes(size: int, num_slots: int) -> int:
        """Return how many bytes at the front of the arena signals and marks of a group take."""
        marks = 8 * size * num_slots
        return len(Signal) * size * size * NBYTES + -(-marks // ALIGNMENT) * ALIGNMENT

    def init(self) -> None:
        """Set the semaphores up; on one rank, before any other uses them."""
        size = len(self.peers)
        for signal in Signal:
            for index in range(size * size):
                value = self._num_slots if signal is Signal.FREE else 0
                self._open().init(signal * size * size + index, value)

    def close(self) -> None:
        """Let go of the shared memory."""
        self._semaphores = self._marks = None

    def send(self, signal: Signal, to: int) -> None:
        """Signal one rank; never blocks."""
        self._open().post(self._index(signal, self.rank, to))

    def await_(self, signal: Signal, source: int, entry: NamedCollective) -> None:
        """Take a signal of a rank, waiting for it.

        Args:
            signal: which one.
            source: the rank.
            entry: what this rank cannot complete without it.

        Raises:
            PeerLostError: the rank has ended, or did not come within the timeout.
            AgreementError: it has come to something else, and waits for this rank there.
        """
        index = self._index(signal, source, self.rank)
        take = self._open().take
        for _ in range(_SPINS):
            if take(index):
                return
        self._sleep(index, source, entry)

    def mark(self, slot: int, mark: int) -> None:
        """Leave a mark for the others, before the signal that tells them to look."""
        assert self._marks is not None
        self._marks[self.rank * self._num_slots + slot] = mark

    def check(self, slot: int, mark: int, source: int, entry: NamedCollective) -> None:
        """Compare a rank's mark with this rank's own, after its signal.

        Raises:
            AgreementError: they differ.
        """
        assert self._marks is not None
        if self._marks[source * self._num_slots + slot] != mark:
            ranks = self.channel.ranks
            raise self._fail(
                Verdict(
                    "differ",
                    f"rank {ranks[source]} has come to another collective than rank "
                    f"{ranks[self.rank]}, which is at {entry.text()}: the ranks run different "
                    "programs. Look for an error that one of them caught, or for a branch that "
                    "only some take",
                ),
                entry,
            )

    def _fail(self, verdict: Verdict, entry: NamedCollective) -> TorchloomError:
        """Return the error of a run that cannot go on; from now on it is that of all attempts."""
        error = explained(entry, verdict)
        if POSITION.verdict is None:
            POSITION.verdict = verdict
        return error

    def _open(self) -> Semaphores:
        if self._semaphores is None:
            raise ShardError("the shared memory of a destroyed process group was used")
        return self._semaphores

    def _sleep(self, index: int, source: int, entry: NamedCollective) -> None:
        before, now = POSITION.waiting, time.monotonic()
        POSITION.waiting = Wait(entry, now)
        deadline = now + self.timeout_s
        semaphores = self._open()
        try:
            while not semaphores.take_within(index, _SLICE_S):
                if POSITION.verdict is not None:
                    raise POSITION.verdict.error()
                is_alive = self.peers[source].is_alive()
                if semaphores.take(index):  # its last word, before it ended
                    return
                if not is_alive or time.monotonic() > deadline:
                    raise self._fail(self._lost(source, is_alive), entry)
        finally:
            POSITION.waiting = before

    def _lost(self, source: int, is_alive: bool) -> Verdict:
        who = f"rank {self.channel.ranks[source]} (process {self.peers[source].pid})"
        if is_alive:
            return Verdict(
                "late",
                f"{who} did not arrive within {self.timeout_s:.0f} s: it is stuck, much slower, or "
                "takes a branch without this collective; look at its output",
            )
        return Verdict(
            "lost",
            f"{who} has ended while rank {self.channel.ranks[self.rank]} was waiting for it: look "
            "at the output of that rank for the cause; this run cannot go on without it",
        )

    def _index(self, signal: Signal, source: int, target: int) -> int:
        size = len(self.peers)
        return (signal * size + source) * size + target


def mark_of(entry: NamedCollective, number: int) -> int:
    """Return a number that differs where the entry or the number of a signal differ."""
    return entry.key << 32 | number & 0xFFFFFFFF
