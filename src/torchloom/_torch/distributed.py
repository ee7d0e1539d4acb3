"""Process groups: what they were built with, their collectives on single tensors and on several, and a watch on all of them.

torch has given collectives new names and warns about the old ones: the newest that there are are used.

A request to a store whose process has ended raises an error, and before that prints a warning with a stack of C++
on stderr: `hushed_store` keeps c10 quiet meanwhile. No order of calls avoids it: the process may end while it answers. The level
of c10's warnings is a global of its library, read at each of them, and nothing in Python sets it after
torch was imported; `TORCH_CPP_LOG_LEVEL` is read at the import alone.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    ReduceScatterOptions,
    _get_default_store,
    _get_process_group_store,
)

from torchloom import envs
from torchloom._torch.tensors import tensors_inside


def default_store() -> Any:
    """Return the key-value store that the default process group was built with."""
    return _get_default_store()


def own_store() -> Any:
    """Return the default group's store through a connection of its own, where it can have one.

    A call that blocks holds a connection, so that a thread needs another one.
    """
    store = default_store()
    try:
        return store.clone()
    except (NotImplementedError, RuntimeError):  # stores without a server have no connection
        return store


def group_store(group: Any) -> Any:
    """Return the key-value store of a process group, shared by its ranks alone."""
    return _get_process_group_store(group)


def group_timeout(group: Any) -> timedelta:
    """Return how long a collective of a process group may take."""
    return group._get_backend(torch.device("cpu")).options._timeout


def abort(group: dist.ProcessGroup) -> None:
    """End what a group's accelerators communicate, on this rank; the group is of no use afterwards.

    Raises:
        RuntimeError: the group has no backend, or one that cannot.
    """
    # Of the group itself, `abort` asks its default backend: gloo, where there is one for each kind of device.
    group._get_backend(_device_of(group)).abort()


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the kind of device whose backend carries what models send."""
    return next((d for d in group._device_types if d.type != "cpu"), torch.device("cpu"))


def _newest(owner: Any, name: str, old: str) -> Callable[..., Any]:
    return getattr(owner, name, None) or getattr(owner, old)


def _newest_name(name: str, old: str) -> str:
    return name if hasattr(dist.ProcessGroup, name) else old


all_gather_single = _newest(dist, "all_gather_single", "all_gather_into_tensor")
"""Gathers one tensor."""

reduce_scatter_single = _newest(dist, "reduce_scatter_single", "reduce_scatter_tensor")
"""Sums one tensor into shards."""

# Names, not functions: a process group written in Python overrides methods.
ALL_GATHER_COALESCED = _newest_name(
    "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
)
REDUCE_SCATTER_COALESCED = _newest_name(
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
)


def has_single_names() -> bool:
    """Return whether collectives on single tensors have names of their own."""
    return hasattr(dist, "all_gather_single")


def supports_coalescing(group: dist.ProcessGroup) -> bool:
    """Say whether a group sends several tensors by one collective without copies.

    Gloo has the calls too, but packs gathers itself and sends reductions one by one, so it says no.
    The backend of the accelerator counts, where a group has one for it and one for the CPU.
    """
    try:
        return bool(group._get_backend(_device_of(group)).supports_coalescing)
    except RuntimeError:  # a process group written in Python has no backend
        return False


def all_gather_coalesced(
    group: dist.ProcessGroup, fulls: Sequence[Tensor], shards: Sequence[Tensor]
) -> Any:
    """Begin to gather several shards by one collective; return its work.

    Args:
        group: whose ranks take part.
        fulls: the results, each the size of its shards of all ranks.
        shards: what this rank sends.
    """
    options = AllgatherOptions()
    options.asyncOp = True
    return getattr(group, ALL_GATHER_COALESCED)(list(fulls), list(shards), options)


def reduce_scatter_coalesced(
    group: dist.ProcessGroup, shards: Sequence[Tensor], fulls: Sequence[Tensor]
) -> Any:
    """Begin to sum several tensors into shards by one collective; return its work.

    Args:
        group: whose ranks take part.
        shards: the results: this rank's parts of the sums.
        fulls: what this rank sends, each the size of its shards of all ranks.
    """
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.SUM
    options.asyncOp = True
    return getattr(group, REDUCE_SCATTER_COALESCED)(list(shards), list(fulls), options)


def all_reduce_coalesced(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> Any:
    """Begin to sum several tensors in place by one collective; return its work."""
    options = AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.SUM
    options.asyncOp = True
    return group.allreduce_coalesced(list(tensors), options)


Check = Callable[[str, Iterable[Tensor]], None]
"""(name of the collective, tensors that it is given) -> raises where it must not run."""

_METHODS = (
    "broadcast allreduce allreduce_coalesced reduce allgather allgather_coalesced allgather_into_tensor_coalesced"
    " _allgather_base gather scatter reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall"
    " alltoall_base send recv"
)


def watch_collectives(check: Check) -> None:
    """Let `check` see the tensors of each collective that is called from outside of torchloom, from now on.

    All of `torch.distributed`'s functions call methods of the group, whoever imported them before; so methods are
    wrapped. What DistributedDataParallel and its helpers broadcast goes by a function of its own.

    Args:
        check: is called before the collective begins.
    """
    for name in _METHODS.split():
        if hasattr(dist.ProcessGroup, name):
            setattr(
                dist.ProcessGroup, name, _checked(getattr(dist.ProcessGroup, name), name, check)
            )
    module: Any = dist
    module._broadcast_coalesced = _checked(module._broadcast_coalesced, "broadcast", check)


def _checked(method: Callable[..., Any], name: str, check: Check) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not str(sys._getframe(1).f_globals.get("__name__")).startswith("torchloom."):
            check(name.strip("_"), tensors_inside((args, kwargs)))
        return method(*args, **kwargs)

    return call


_FATAL = 3
"""c10's levels: 0 information, 1 warning, 2 error, 3 fatal."""

_LOCK = threading.Lock()
_HELD: list[int] = []
"""The level from before, once for each thread that is inside."""


@contextmanager
def hushed_store() -> Iterator[None]:
    """Print no warning or error of c10's within a `with` block whose errors are told in a sentence.

    `TORCHLOOM_TRACEBACK=1` leaves them as they are.
    """
    level = _level()
    if level is None or envs.is_on("TORCHLOOM_TRACEBACK"):
        yield
        return
    with _LOCK:
        _HELD.append(_HELD[0] if _HELD else level.value)
        level.value = max(level.value, _FATAL)
    try:
        yield
    finally:
        with _LOCK:
            before = _HELD.pop()
            if not _HELD:
                level.value = before


@functools.cache
def _level() -> ctypes.c_int | None:
    """Return the global that holds the level; None where this build of torch has none."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
