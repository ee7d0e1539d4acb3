"""Copies on a CPU: one background thread per direction, each a queue that is worked off in order.

Nothing is gained by it on a CPU alone, where both pools are the same memory. It makes every
offload path truly asynchronous in tests: what a GPU could read or free too early, the threads can.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(source, destination) of copies that belong together."""


@dataclass(frozen=True)
class ThreadTicket:
    """A copy under way."""

    future: Future[None]

    def finish(self) -> None:
        """Block until the copy is done; raise what it raised."""
        self.future.result()


class ThreadEngine:
    """Copies in the background, one batch after the other; the thread starts with the first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, pairs: Pairs) -> ThreadTicket:
        """Begin to copy each source into its destination."""
        if self._thread is None:
            # One thread of torch's: copies must not take the compute's cores.
            self._thread = ThreadPoolExecutor(
                1, f"torchloom-{self.name}", torch.set_num_threads, (1,)
            )
        return ThreadTicket(self._thread.submit(copy_all, list(pairs)))

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
