"""Programs of exact sizes as recorded launches, one recording for each size (CUDA graphs).

A recorded program reads and writes fixed memory: arguments are copied in, results are copied out, so a result
stays what it is when the next call runs. Parameters are read where they are: weights that are written in place
are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from torchloom.errors import ServeError
from torchloom.serve.counter import counter
from torchloom.serve.stitch import Stitching

Call = Callable[..., Any]
_NUM_WARM = 2
"""Runs before recording: libraries choose algorithms and allocate workspaces in the first."""


CudaGraphs = Literal["off", "full", "pieces"]


class Recording(Protocol):
    """Something that runs a function once while noting what it launches, and launches it again."""

    def record(self, call: Callable[[], Any]) -> Any:
        """Run a function and note its launches; return its result."""
        ...

    def replay(self) -> None:
        """Launch again what was noted."""
        ...


class CudaRecording:
    """A CUDA graph."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ServeError("cuda_graphs needs a CUDA device: leave it off here")
        self._graph = torch.cuda.CUDAGraph()

    def record(self, call: Callable[[], Any]) -> Any:
        """Run a function under capture."""
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            return call()

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


class Recorded:
    """A compiled graph that is recorded at its first call for each set of sizes.

    Args:
        call: takes the graph's inputs and returns its outputs.
        fixed: places of inputs whose memory does not move, such as parameters.
        make: makes recordings; CUDA graphs if left out.
    """

    def __init__(
        self, call: Call, fixed: Collection[int], make: Callable[[], Recording] | None = None
    ) -> None:
        self._call, self._fixed, self._make = call, frozenset(fixed), make or CudaRecording
        self._recordings: dict[tuple[Any, ...], tuple[Recording, list[Any], Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        """Copy the inputs in, launch, copy the outputs out."""
        key = tuple(
            value.data_ptr()
            if place in self._fixed and isinstance(value, Tensor)
            else tuple(value.shape)
            if isinstance(value, Tensor)
            else value
            for place, value in enumerate(inputs)
        )
        if key not in self._recordings:
            self._recordings[key] = self._recorded(inputs)
            counter.num_recorded += 1
        recording, held, outputs = self._recordings[key]
        for place, (mine, given) in enumerate(zip(held, inputs, strict=True)):
            if place not in self._fixed and isinstance(mine, Tensor):
                mine.copy_(given)
        recording.replay()
        return tuple(out.clone() if isinstance(out, Tensor) else out for out in outputs)

    def _recorded(self, inputs: tuple[Any, ...]) -> tuple[Recording, list[Any], Any]:
        held = [
            value.clone() if isinstance(value, Tensor) and place not in self._fixed else value
            for place, value in enumerate(inputs)
        ]
        for _ in range(_NUM_WARM):
            self._call(*held)
        recording = self._make()
        return recording, held, recording.record(lambda: self._call(*held))


def assembled(
    stitching: Stitching,
    calls: Sequence[Call],
    how: CudaGraphs,
    fixed: Sequence[Collection[int] | None],
) -> Call:
    """Return the function of a graph in pieces, recorded as asked.

    Args:
        stitching: the order of calls.
        calls: the pieces' functions.
        how: what is recorded.
        fixed: for each piece, places of inputs that are the model's own tensors; None for operators that
            stay as they are, which are not recorded by themselves.
    """
    if how == "pieces":
        calls = [
            call if places is None else Recorded(call, places)
            for call, places in zip(calls, fixed, strict=True)
        ]
    whole = stitching.function(calls)
    if how != "full":
        return whole
    places = {
        ref.slot
        for step in stitching.steps
        for place, ref in enumerate(step.args)
        if place in (fixed[step.piece] or ())
        and ref.slot is not None
        and ref.slot < stitching.num_inputs
    }
    return Recorded(whole, places)
