"""Copies of the CPU with random delays, over memory that is poisoned: races of a schedule show as other results."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torchloom.runtime.host import HostArena, Mover
from torchloom.runtime.host import mover as movers

_POISON = 0xFF
"""Four or two of these bytes are a NaN in every float type."""


@contextmanager
def fuzzed(seed: int, most_s: float = 1e-3) -> Iterator[None]:
    """Delay each copy for up to `most_s`, and fill memory with NaNs when it is made, freed, or about to be written."""
    draws, copy_all = random.Random(seed), movers.copy_all
    empty, bury, begin_copy = HostArena.empty, HostArena._bury, Mover.begin_copy

    def late(pairs):
        if draws.random() < 0.5:
            time.sleep(draws.random() * most_s)
        copy_all(pairs)

    def poisoned(self, *args, **kwargs):
        made = empty(self, *args, **kwargs)
        ctypes.memset(made.data_ptr(), _POISON, made.nbytes)
        return made

    def buried(self):
        for block in list(self._dead):
            ctypes.memset(block.address, _POISON, block.nbytes)
        bury(self)

    def begun(self, direction, pairs):
        for _, destination in pairs if direction == "to_device" else ():
            if destination.is_contiguous():
                ctypes.memset(destination.data_ptr(), _POISON, destination.nbytes)
        return begin_copy(self, direction, pairs)

    with (
        mock.patch.object(movers, "copy_all", late),
        mock.patch.object(HostArena, "empty", poisoned),
        mock.patch.object(HostArena, "_bury", buried),
        mock.patch.object(Mover, "begin_copy", begun),
    ):
        yield
