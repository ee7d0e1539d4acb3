"""CUDA graphs: launches that were recorded once and run again, and what the recordings on one device share.

The recordings of a served program (`serve.call.cuda_graphs`) and of training steps (`capture.recorded`) share one pool of
memory and take turns. Memory of a recording's results stays its own as long as these tensors live; the rest of what it
computes with lies where the next one computes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchloom.errors import CompileError


class Pool:
    """What the recordings on one device share: memory, and the turn to run.

    Args:
        device: where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._handle: Any = None
        self._stream: Any = None
        self._members: weakref.WeakSet[CudaRecording] = weakref.WeakSet()
        self._done: Any = None
        """The end of the last turn on a device, for turns on other streams."""

    def handle_for(self, recording: CudaRecording) -> Any:
        """Return the pool of device memory for a CUDA graph: that of the graphs that live, or a new one.

        torch frees a pool with its last graph, and fails (`use_count > 0`) where one is recorded into it later.
        """
        if not self._members:
            self._handle = torch.cuda.graph_pool_handle()
        self._members.add(recording)
        return self._handle

    @contextmanager
    def capturing(self, recording: CudaRecording, graph: Any) -> Iterator[None]:
        """Note what is launched on this device in a CUDA graph; other threads may use the device meanwhile.

        On a stream of the device: torch's own default is one stream for all recordings of a process, of the device that
        was recorded first.
        """
        with torch.cuda.device(self._device):
            self._stream = self._stream or torch.cuda.Stream(self._device)
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(
                graph,
                pool=self.handle_for(recording),
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                yield

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run on the stream of recordings, between what the current stream was given before and what it is given after.

        Libraries keep workspaces for each stream. No `record_stream` is needed: memory that changes streams is
        free again between two such blocks, or within one of which the other stream waits for the end.
        """
        if self._device.type != "cuda":
            yield
            return
        with torch.cuda.device(self._device):
            self._stream = self._stream or torch.cuda.Stream(self._device)
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                current.wait_stream(self._stream)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run while no other recording on the device does, on any thread or stream."""
        is_cuda = self._device.type == "cuda"
        with self._lock:
            if is_cuda and self._done is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(self._done)
            try:
                yield
            finally:
                if is_cuda:
                    self._done = torch.cuda.Event()
                    self._done.record(torch.cuda.current_stream(self._device))


_POOLS: dict[torch.device, Pool] = {}
"""One for each device, shared by all recordings of this process."""


def pool_of(device: torch.device) -> Pool:
    """Return what the recordings on a device share.

    Args:
        device: where they run.
    """
    return _POOLS.get(device) or _POOLS.setdefault(device, Pool(device))


class CudaRecording:
    """A CUDA graph: runs a function once while noting what it launches, and launches it again.

    Args:
        pool: where its memory comes from.
    """

    def __init__(self, pool: Pool) -> None:
        if not torch.cuda.is_available():
            raise CompileError("cuda_graphs needs a CUDA device: leave it off here")
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def record(self, call: Callable[[], Any]) -> Any:
        """Run a function under capture."""
        with self._pool.capturing(self, self._graph):
            return call()

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()
