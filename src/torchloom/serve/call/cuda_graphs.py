"""Programs of exact sizes as recorded launches, one recording for each size (CUDA graphs).

A recorded program reads and writes fixed memory: arguments are copied in, results are copied out, so a result
stays what it is when the next call runs. Parameters are read where they are: weights that are written in place
are seen. So are arguments that the program writes to, such as caches of keys and values: nothing of them is
copied, and each address has a recording of its own.

All recordings on a device share a pool of memory for what they compute, as those of vLLM do, and take turns:
one runs at a time, whatever program, thread or stream it is of. torch allows any order of replays then, of other
models too, as long as none reads what another one left in the pool; each turn ends with its results copied out. A
recording uses again what earlier ones freed, so the largest size is recorded first (`warm_up`, `builder.build`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor

from torchloom._torch.cuda_graphs import CudaRecording, Pool, pool_of
from torchloom.serve.counter import counter

log = logging.getLogger(__name__)

Call = Callable[..., Any]
_NUM_WARM = 2
"""Runs before recording: libraries choose algorithms and allocate workspaces in the first."""
_MOST_ADDRESSES = 16
"""Recordings for one set of sizes: a caller with more places for its caches is served without."""
CudaGraphs = Literal["off", "full", "pieces"]


class Recorded:
    """A compiled graph that is recorded at its first call for each set of sizes.

    Args:
        call: takes the graph's inputs and returns its outputs.
        fixed: places of inputs whose memory does not move, such as parameters.
        written: places of inputs that it writes to.
        passing: places of inputs that are made anew for each call, whose address says nothing.
        make: makes recordings; CUDA graphs if left out.
    """

    def __init__(
        self,
        call: Call,
        fixed: Collection[int],
        written: Collection[int] = (),
        passing: Collection[int] = (),
        make: Callable[[Pool], Any] | None = None,
    ) -> None:
        self._call, self._make = call, make or CudaRecording
        self._written = frozenset(written)
        self._passing = frozenset(passing)
        self._in_place = frozenset(fixed) | self._written - self._passing
        """Places of inputs that are used where they are."""
        self._recordings: dict[tuple[Any, ...], tuple[Any, list[Any], Any]] = {}
        self._num_of: dict[tuple[Any, ...], int] = {}
        """How many recordings there are for one set of sizes."""

    def __call__(self, *inputs: Any) -> Any:
        """Copy the inputs in, launch, copy the outputs out."""
        on = (value.device for value in inputs if isinstance(value, Tensor) and value.is_cuda)
        device = next(on, torch.device("cpu"))
        pool = pool_of(device)
        with pool.turn():
            return self._run(inputs, pool)

    def forget(self) -> None:
        """Drop recordings for arguments at addresses: of a build's own examples, which are gone."""
        if self._written - self._passing:
            self._recordings.clear()
            self._num_of.clear()

    def _run(self, inputs: tuple[Any, ...], pool: Pool) -> Any:
        key = tuple(
            (value.data_ptr(), *value.shape, *value.stride())
            if place in self._in_place and isinstance(value, Tensor)
            else tuple(value.shape)
            if isinstance(value, Tensor)
            else value
            for place, value in enumerate(inputs)
        )
        if key not in self._recordings and not self._record(key, inputs, pool):
            return self._call(*inputs)
        recording, held, outputs = self._recordings[key]
        for place, (mine, given) in enumerate(zip(held, inputs, strict=True)):
            if place not in self._in_place and isinstance(mine, Tensor):
                mine.copy_(given)
        recording.replay()
        for place in self._written - self._in_place:
            inputs[place].copy_(held[place])
        stays = {
            _memory(value)
            for place, value in enumerate(inputs)
            if place in self._in_place and isinstance(value, Tensor)
        }
        # What lies in memory of the caller's is the caller's; the rest is written anew by the next call.
        return tuple(
            out.clone() if isinstance(out, Tensor) and _memory(out) not in stays else out
            for out in outputs
        )

    def _record(self, key: tuple[Any, ...], inputs: tuple[Any, ...], pool: Pool) -> bool:
        """Make the recording for some inputs; say whether there is room for it."""
        sizes = tuple(tuple(v.shape) if isinstance(v, Tensor) else v for v in inputs)
        number = self._num_of.get(sizes, 0)
        if number >= _MOST_ADDRESSES:
            if number == _MOST_ADDRESSES:
                self._num_of[sizes] = number + 1
                log.warning(
                    "calls of sizes %s write to tensors at more than %d addresses: further ones run without "
                    "CUDA graphs; pass the same tensors again, as for a cache that is allocated once",
                    *(sizes, _MOST_ADDRESSES),
                )
            return False
        self._num_of[sizes] = number + 1
        self._recordings[key] = self._recorded(inputs, pool)
        counter.num_recorded += 1
        return True

    def _recorded(self, inputs: tuple[Any, ...], pool: Pool) -> tuple[Any, list[Any], Any]:
        held = [
            value.clone() if isinstance(value, Tensor) and place not in self._in_place else value
            for place, value in enumerate(inputs)
        ]
        # Runs before the first replay write as well, and a call writes once.
        before = [
            (value, _copy_of(value))
            for place, value in enumerate(held)
            if place in self._written and isinstance(value, Tensor)
        ]
        for _ in range(_NUM_WARM):
            self._call(*held)
        recording = self._make(pool)
        outputs = recording.record(lambda: self._call(*held))
        with torch.no_grad():
            for value, was in before:
                value.copy_(was)
        # The caller's tensors are not kept alive: a recording knows their address, by which it is found.
        kept = [
            None if place in self._written & self._in_place else value
            for place, value in enumerate(held)
        ]
        return recording, kept, outputs


def _copy_of(tensor: Tensor) -> Tensor:
    """Return a copy on the tensor's device; on the host where it has no room, as for a cache that fills it."""
    try:
        return tensor.detach().clone()
    except torch.OutOfMemoryError:
        return tensor.detach().cpu()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
