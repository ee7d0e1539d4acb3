"""A stand-in for CUDA graphs that runs on a CPU: notes the operators of a function, and runs them again on the same memory.

As under capture, nothing has been computed when recording ends: what was written is put back, results are filled with
NaN. A replay runs the noted operators, no Python of the function, and scribbles over all that it made but the
results, as other graphs of the pool may. Numbers that a replay counts for collectives are its own affair: on a device
no Python runs, so they are put back.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from torchloom._torch import cuda_graphs
from torchloom.capture import recorded
from torchloom.ops import gather_start, reduce_start, sync_start, wait_
from torchloom.runtime import channel, communicators

_STARTS = (gather_start, reduce_start, sync_start)


class Tape(TorchDispatchMode):
    """Stands in for `CudaRecording`.

    Args:
        pool: not used.
    """

    log: ClassVar[list[str]] = []
    """"warm-up", "capture" and "replay", in order."""
    noted: ClassVar[list[list[str]]] = []
    """The operators of each recording."""
    by_calls: ClassVar[bool] = False
    """Replay by calling the function again: for compiled code, whose kernels no mode sees."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, Any]] = []
        self._made: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def record(self, call: Callable[[], Any]) -> Any:
        Tape.log.append("capture")
        random = torch.get_rng_state()
        self._call = call
        if Tape.by_calls:
            given = inspect.getclosurevars(call).nonlocals["held"]
            self._before = {each: (value, value.clone()) for each, value in enumerate(given)}
            self._results = list(call())
        else:
            with self:
                self._results = list(call())
        torch.set_rng_state(random)
        with torch.no_grad():
            for tensor, was in self._before.values():
                tensor.copy_(was)
            self._scribble(self._made.values(), keep=())
        Tape.noted.append([str(step[0]) for step in self._steps])
        return self._results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        for tensor in given if func._schema.is_mutable else ():
            if _place(tensor) not in self._made and _place(tensor) not in self._before:
                self._before[_place(tensor)] = tensor, tensor.clone()
        result = func(*args, **kwargs)
        owned = {_place(each) for each in given}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and _place(each) not in owned:
                self._made[_place(each)] = each
        self._steps.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        Tape.log.append("replay")
        with _disable_current_modes(), torch.no_grad(), _uncounted():
            if Tape.by_calls:
                for mine, new in zip(self._results, self._call(), strict=True):
                    if isinstance(mine, Tensor) and mine.data_ptr() != new.data_ptr():
                        mine.copy_(new)
            else:
                self._run()
                self._scribble(self._made.values(), keep=self._results)

    def _run(self) -> None:
        under_way: dict[int, Tensor] = {}
        for func, args, kwargs, result in self._steps:
            if func is wait_:
                results, *rest = args
                arrived = [under_way.pop(id(each), each) for each in results]
                func(arrived, *rest, **kwargs)
                for old, new in zip(results, arrived, strict=True):
                    old.copy_(new)
                continue
            found = func(*args, **kwargs)
            if func in _STARTS:
                under_way |= {id(old): new for old, new in zip(result, found, strict=True)}
                continue
            given = {
                _place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)
            }
            for old, new in zip(tree_leaves(result), tree_leaves(found), strict=True):
                if isinstance(old, Tensor) and _place(new) not in given:
                    old.copy_(new)

    def _scribble(self, made: Any, keep: Any) -> None:
        kept = {_place(each) for each in keep if isinstance(each, Tensor)}
        for each in list(made):
            if isinstance(each, Tensor) and each.is_floating_point() and _place(each) not in kept:
                each.fill_(torch.nan)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def _uncounted() -> Iterator[None]:
    """Put back what bodies of collectives count."""
    channels = [(each, dict(vars(each))) for each in channel.CHANNELS.values()]
    for each, was in channels:
        each._numbers, each.begun, each.recent = (
            dict(was["_numbers"]),
            was["begun"].copy(),
            was["recent"].copy(),
        )
    found = list(communicators._COMMUNICATORS.values())
    counts = [(each, each._num_collectives, each._num_bytes) for each in found]
    try:
        yield
    finally:
        for each, was in channels:
            vars(each).update(was)
        for each, *counted in counts:
            each._num_collectives, each._num_bytes = counted


class Seen(TorchDispatchMode):
    """Notes the operators that run beside a recording."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def standing_in(*, by_calls: bool = False, carries_gloo: bool = True) -> Iterator[type[Tape]]:
    """Let CPUs record in a `with` block.

    Args:
        by_calls: see `Tape`.
        carries_gloo: whether what gloo carries can be recorded.
    """
    Tape.log, Tape.noted, Tape.by_calls = [], [], by_calls

    @contextlib.contextmanager
    def beside(pool: Any) -> Iterator[None]:
        Tape.log.append("warm-up")
        yield

    with (
        mock.patch.object(recorded, "DEVICE", "cpu"),
        mock.patch.object(recorded, "CudaRecording", Tape),
        mock.patch.object(cuda_graphs.Pool, "beside", beside),
        mock.patch.object(channel, "never", (lambda why: None) if carries_gloo else channel.never),
    ):
        yield Tape
