"""What a collective implementation must do: one class per transport.

Each collective has a label; ranks whose labels differ get an error, never each other's bytes. All methods only *begin* communication; they return a `Pending` whose `finish()` blocks until every
result holds its value. Results are allocated by the caller. Arguments are contiguous. All ranks
call the same methods in the same order with equally sized tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchloom.errors import ShardError
from torchloom.runtime.channel import Label


def carrier_of(group: dist.ProcessGroup) -> str:
    """Return the backend that carries what a model sends over a group.

    A group with a backend for each kind of device ("cpu:gloo,cuda:nccl", torch's default where there are GPUs) counts by
    the GPUs. Of a group whose maker named none, torch says "undefined".
    """
    backend = str(dist.get_backend(group))
    if backend == "undefined":
        backend = dist.get_backend_config(group)
    if "nccl" in backend and "gloo" in backend:
        return "nccl" if torch.cuda.is_available() else "gloo"
    return backend


def carried_by_gloo(group: dist.ProcessGroup) -> bool:
    """Say whether gloo carries what a model sends over a group."""
    return "gloo" in carrier_of(group)


class GroupRef:
    """A process group that is used but not kept alive.

    `dist.destroy_process_group` stops a group's threads when the last reference to it goes. Kept
    longer, gloo's threads run into the exit of the interpreter, where one that drops the last
    reference to a tensor waits for the GIL and takes the process down with SIGABRT.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.size, self.rank = group.size(), group.rank()

    def __call__(self) -> dist.ProcessGroup:
        """Return the group.

        Raises:
            ShardError: the group has been destroyed.
        """
        group = self._group()
        if group is None:
            raise ShardError(
                f"the process group of {self.size} ranks over which this model is sharded has been "
                "destroyed: call torchloom.shard.unshard(model) before "
                "torch.distributed.destroy_process_group(), or keep the group"
            )
        return group

    def refers_to(self, group: dist.ProcessGroup | None) -> bool:
        """Say whether this is `group`."""
        return group is not None and self._group() is group


@dataclass(frozen=True)
class Pending:
    """Communication, or a copy, on its way. Holds references to everything that is on the wire."""

    finish: Callable[[], object]
    """Block until the results have arrived."""
    drop: Callable[[], None] = lambda: None
    """Called instead where nobody will wait any more."""


_ON_THE_WAY: dict[int, Pending] = {}
"""By the address of the first result that has one; empty tensors need no communication."""


def note_pending(results: Sequence[Tensor], pending: Pending) -> None:
    """Keep what is on its way for `wait_for_results`."""
    key = _address_of(results)
    if key is not None:
        # An entry at this address is of a graph that raised between start and wait, whose memory was given away since.
        if (stale := _ON_THE_WAY.pop(key, None)) is not None:
            stale.drop()
        _ON_THE_WAY[key] = pending


def wait_for_results(results: Sequence[Tensor]) -> None:
    """Block until the results of one `begin_*` call of a communicator or mover hold their values.

    Raises:
        ShardError: the results did not come from such a call, or were waited for before.
    """
    key = _address_of(results)
    if key is None:
        return
    pending = _ON_THE_WAY.pop(key, None)
    if pending is None:
        raise ShardError(
            f"{len(results)} tensors were waited for that are not on their way: a pass placed two waits for one start, "
            "or none"
        )
    pending.finish()


def _address_of(results: Sequence[Tensor]) -> int | None:
    return next((t.data_ptr() for t in results if t.numel()), None)


class UnavailableError(Exception):
    """A transport cannot be had here; the message is the reason, equal on all ranks."""


class Collectives(Protocol):
    """Moves tensors between the ranks of one group."""

    def all_gather(self, shards: Sequence[Tensor], fulls: Sequence[Tensor], what: Label) -> Pending:
        """Begin to fill `fulls[i]` (world size times `shards[i]`) with all ranks' `shards[i]`.

        Args:
            shards: this rank's, of any dtypes.
            fulls: where all ranks' shards end up, in rank order.
            what: what this is; equal on all ranks.
        """
        ...

    def reduce_scatter(
        self, fulls: Sequence[Tensor], shards: Sequence[Tensor], scale: float, what: Label
    ) -> Pending:
        """Begin to fill `shards[i]` with this rank's slice of the sum of all `fulls[i]`.

        A full tensor may hold fewer elements than world size times its shard; the rest of the
        last shards is then padding and becomes zero. The sum is multiplied by `scale` and cast
        to the shard's dtype.

        Args:
            fulls: this rank's addends.
            shards: where this rank's slices of the sums end up.
            scale: what each sum is multiplied by.
            what: what this is; equal on all ranks.
        """
        ...

    def all_reduce(self, tensors: Sequence[Tensor], scale: float, what: Label) -> Pending:
        """Begin to replace each tensor by `scale` times its sum over the ranks, in place.

        Args:
            tensors: this rank's addends, and where the sums end up.
            scale: what each sum is multiplied by.
            what: what this is; equal on all ranks.
        """
        ...

    def all_to_all(
        self, sent: Tensor, received: Tensor, numels: Sequence[Sequence[int]], what: Label
    ) -> Pending:
        """Begin to send each rank its part of `sent`, and to fill `received` with what ranks send this one.

        Args:
            sent: flat, the parts for all ranks end to end, in rank order.
            received: flat, of the same dtype: the parts from all ranks, in rank order.
            numels: elements that rank i sends rank j, as `numels[i][j]`; equal on all ranks.
            what: what this is; equal on all ranks.
        """
        ...

    def meet(self, what: Label) -> None:
        """Return when all ranks of the group have come here, before something without a label."""
        ...

    def gather_transit(self, numels: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes that an all-gather of such shards holds until it is finished: none of a rank's own."""
        return 0

    def reduce_transit(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        full_numels: Sequence[int] | None = None,
    ) -> int:
        """Return the bytes that a reduce-scatter into such shards holds until it is finished: none of a rank's own.

        Args:
            numels: elements of each shard.
            dtype: of the shards.
            wire_dtype: of the full tensors.
            full_numels: elements of each full tensor; default: no padding.
        """
        return 0

    def all_reduce_transit(self, numels: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes that an all-reduce of such tensors holds until it is finished: none of a rank's own."""
        return 0
