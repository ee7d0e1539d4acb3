"""Copies on a CPU: one background thread per direction, each a queue that is worked off in order.

Nothing is gained by it on a CPU alone, where both pools are the same memory. It makes every
offload path truly asynchronous in tests: what a GPU could read or free too early, the threads can.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(source, destination) of copies that belong together."""


@dataclass
class ThreadTicket:
    """A copy under way; holds its tensors until it is done."""

    pairs: list[tuple[Tensor, Tensor]]
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def finish(self) -> None:
        """Block until the copy is done; raise what it raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error


@dataclass
class Jitter:
    """Random delays before copies, for tests: the order of threads becomes arbitrary."""

    seed: int
    most_s: float
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def sleep(self) -> None:
        """Wait for a random time, often for none."""
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * self.most_s)


class ThreadEngine:
    """Copies in the background, one batch after the other; the thread starts with the first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.jitter: Jitter | None = None
        self._queue: queue.SimpleQueue[ThreadTicket | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, pairs: Pairs) -> ThreadTicket:
        """Begin to copy each source into its destination."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name=f"torchloom-{self.name}", daemon=True
            )
            self._thread.start()
        ticket = ThreadTicket(list(pairs))
        self._queue.put(ticket)
        return ticket

    def stop(self) -> None:
        """Finish what is queued and end the thread; a later `begin` starts a new one."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread alone: copies must not take the compute's cores
        while (ticket := self._queue.get()) is not None:
            if self.jitter is not None:
                self.jitter.sleep()
            self._copy(ticket)
            # Between two copies this frame must not keep the last one's tensors alive.
            del ticket

    def _copy(self, ticket: ThreadTicket) -> None:
        try:
            with torch.no_grad():
                for source, destination in ticket.pairs:
                    destination.copy_(source)
        except BaseException as error:  # noqa: BLE001  raised where the copy is waited for
            ticket.error = error
        # First let go, then tell: who waits may count on the memory being free.
        ticket.pairs.clear()
        source = destination = None
        ticket.done.set()
