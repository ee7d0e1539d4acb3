"""Collectives on single tensors, and on several at once where the process group can do that.

torch has given them new names and warns about the old ones: the newest that there are are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    ReduceScatterOptions,
)


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
        devices = group._device_types
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        return bool(group._get_backend(device).supports_coalescing)
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
