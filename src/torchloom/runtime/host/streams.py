"""Copies of a CUDA device: one stream per direction, so that both run at once (full duplex).

A copy begins after what the compute stream was given before it; `finish` lets the compute stream
wait for it, without blocking the host. Memory needs no `record_stream`: the graph keeps both sides
of a copy until its wait, and what the compute stream does after a wait comes after the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


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
