"""Copies in one direction, in order, beside compute: by a background thread on a CPU, by a stream on a GPU.

Nothing is gained by threads on a CPU alone, where both pools are the same memory. They make every offload path truly
asynchronous in tests: what a GPU could read or free too early, the threads can.

A stream's copy begins after what the compute stream was given before it; `finish` lets the compute stream
wait for it, without blocking the host. Memory needs no `record_stream`: the graph keeps both sides
of a copy until its wait, and what the compute stream does after a wait comes after the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

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


@dataclass
class StreamTicket:
    """A copy under way; holds its tensors until the compute stream waits for it."""

    device: torch.device
    event: torch.cuda.Event
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def finish(self) -> None:
        """Let the current stream of the device wait for the copy."""
        torch.cuda.current_stream(self.device).wait_event(self.event)
        self.pairs.clear()


class StreamEngine:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> StreamTicket:
        """Begin to copy each source into its destination."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            for source, destination in pairs:
                destination.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return StreamTicket(self._device, event, list(pairs))

    def stop(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()
