"""POSIX semaphores in memory that several processes map.

A semaphore is also the memory barrier of what it announces: whoever has waited sees everything that
was written before the post (POSIX, "Memory Synchronization").
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from typing import Any

from torch import Tensor

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
