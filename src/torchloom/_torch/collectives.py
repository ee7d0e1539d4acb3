"""Seeing what Python gives to the collectives of torch's process groups, before they run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

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
            check(name.strip("_"), _tensors((args, kwargs)))
        return method(*args, **kwargs)

    return call


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
