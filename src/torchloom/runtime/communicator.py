"""Communicators: a group of ranks, an implementation, and a count of what went over it.

A communicator may span two axes of a mesh: gradients and weights are sharded over the *shard*
group, and gradients are averaged over the *replicate* group as well (hybrid sharding).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchloom import events
from torchloom.log import get_logger
from torchloom.ops.replays import again
from torchloom.runtime.base import (
    Collectives,
    GroupRef,
    Pending,
    note_pending,
    wait_for_results,
)
from torchloom.runtime.channel import Label, label
from torchloom.runtime.residents import Residents
from torchloom.runtime.transports import shm
from torchloom.shard.shards import shard_numel_of

logger = get_logger(__name__)


class CommStats(NamedTuple):
    """Running totals of one rank: collectives begun, and bytes of their full tensors."""

    num_collectives: int
    num_bytes: int

    def since(self, earlier: CommStats) -> CommStats:
        """Return what came after an earlier count."""
        return CommStats(
            self.num_collectives - earlier.num_collectives, self.num_bytes - earlier.num_bytes
        )


@dataclass
class Communicator:
    """Gathers and averages tensors over one or two process groups."""

    handle: str
    shard_group: GroupRef
    replicate_group: GroupRef | None
    shard: Collectives
    replicate: Collectives | None
    symmetric_memory: bool = False
    """Whether shared memory was asked for, where it can be had."""
    model: int = 0
    """Of the models that share these groups, which one this serves."""
    divide_factor: float | None = None
    """What sums of gradients over all ranks are divided by; None: by the number of ranks."""
    _num_collectives: int = field(default=0, init=False)
    _num_bytes: int = field(default=0, init=False)
    residents: Residents = field(init=False)
    """Weights that stay gathered between micro-steps."""

    def __post_init__(self) -> None:
        self.residents = Residents(self.gather_into, self.world_size)

    @property
    def world_size(self) -> int:
        """Number of ranks that share one copy of the weights."""
        return self.shard_group.size

    @property
    def rank(self) -> int:
        """This process's place among the ranks that share one copy of the weights."""
        return self.shard_group.rank

    @property
    def num_replicas(self) -> int:
        """Number of copies of the weights."""
        return 1 if self.replicate_group is None else self.replicate_group.size

    @property
    def _mean(self) -> float:
        """What a sum over all ranks is multiplied by."""
        return 1.0 / (self.divide_factor or self.world_size * self.num_replicas)

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks that share one copy of the weights communicate through memory."""
        return isinstance(self.shard, shm.SharedMemoryCollectives)

    @property
    def first_handle(self) -> str:
        """The handle of the first model over these groups; equal for all models that share them."""
        return self.handle.partition("/")[0]

    def is_over(
        self, shard_group: dist.ProcessGroup, replicate_group: dist.ProcessGroup | None
    ) -> bool:
        """Say whether this communicator spans these groups."""
        replicate = self.replicate_group
        is_same = (
            replicate_group is None if replicate is None else replicate.refers_to(replicate_group)
        )
        return is_same and self.shard_group.refers_to(shard_group)

    def stats(self) -> CommStats:
        """Return the running totals of this rank."""
        return CommStats(self._num_collectives, self._num_bytes)

    def begin_gather(
        self, shards: Sequence[Tensor], dtype: torch.dtype, names: Sequence[str]
    ) -> list[Tensor]:
        """Begin to gather flat shards, cast to `dtype`; `wait` makes the results valid.

        Args:
            shards: this rank's.
            dtype: in which they travel.
            names: of the parameters; ranks whose names differ get an error.
        """
        sources = [shard.detach().to(dtype).contiguous() for shard in shards]
        fulls = [source.new_empty(source.numel() * self.world_size) for source in sources]
        what = self._label("gather", names, fulls)
        self.begin("gather", fulls, self.shard.all_gather(sources, fulls, what), params=names)
        return fulls

    def gather_into(
        self, shards: Sequence[Tensor], fulls: Sequence[Tensor], names: Sequence[str]
    ) -> None:
        """Gather flat shards into flat tensors that the caller owns, and wait.

        Args:
            shards: this rank's.
            fulls: `world_size` times as long each.
            names: of the parameters; ranks whose names differ get an error.
        """
        self._count(fulls)
        self.shard.all_gather(shards, fulls, self._label("gather", names, fulls)).finish()

    def begin_reduce(
        self,
        grads: Sequence[Tensor],
        shard_numels: Sequence[int],
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        names: Sequence[str],
    ) -> list[Tensor]:
        """Begin to average full gradients into flat shards; `wait` makes the results valid.

        Args:
            grads: this rank's, whole.
            shard_numels: elements of each result, padding included.
            dtype: of the results.
            wire_dtype: in which gradients travel and are summed.
            names: of the parameters; ranks whose names differ get an error.
        """
        sources = [grad.detach().to(wire_dtype).contiguous() for grad in grads]
        shards, pending = self._scatter("reduction", sources, shard_numels, dtype, names)
        self.begin("reduce", shards, pending, payload=sources, params=names)
        return shards

    def begin_sync(
        self,
        grads: Sequence[Tensor],
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        names: Sequence[str],
        *,
        own_slice: bool = False,
    ) -> list[Tensor]:
        """Begin to average whole gradients over all ranks; `wait` makes the results valid.

        With `own_slice` only this rank's slice of each flat gradient is averaged.

        Args:
            grads: this rank's, whole.
            dtype: of the results.
            wire_dtype: in which gradients travel and are summed.
            names: of the parameters; ranks whose names differ get an error.
            own_slice: average this rank's slice alone.
        """
        wires = [grad.detach().to(wire_dtype, copy=not own_slice).contiguous() for grad in grads]
        copies: list[tuple[Tensor, Tensor]] = []
        if own_slice:
            results = [wire.to(dtype, copy=True) for wire in wires]
            numels = [shard_numel_of(wire.numel(), self.world_size) for wire in wires]
            shards, pending = self._scatter("mean of slices", wires, numels, dtype, names)
            for result, shard in zip(results, shards, strict=True):
                own = result.view(-1)[self.rank * shard.numel() : (self.rank + 1) * shard.numel()]
                copies.append((own, shard[: own.numel()]))
        else:
            results = wires
            if dtype != wire_dtype:
                results = [torch.empty_like(wire, dtype=dtype) for wire in wires]
                copies += zip(results, wires, strict=True)
            what = self._label("mean", names, wires)
            pending = self.shard.all_reduce(wires, self._mean, what)
            pending = self._then_replicate(pending, wires, what)

        def finish() -> None:
            pending.finish()
            for place, value in copies:
                place.copy_(value)

        self.begin("sync", results, Pending(finish), payload=wires, params=names)
        return results

    def _scatter(
        self,
        op: str,
        sources: Sequence[Tensor],
        numels: Sequence[int],
        dtype: torch.dtype,
        names: Sequence[str],
    ) -> tuple[list[Tensor], Pending]:
        """Begin to average this rank's slices of whole tensors; return where they end up."""
        shards = [
            source.new_empty(numel, dtype=dtype)
            for source, numel in zip(sources, numels, strict=True)
        ]
        what = self._label(op, names, sources)
        pending = self.shard.reduce_scatter(sources, shards, self._mean, what)
        return shards, self._then_replicate(pending, shards, what)

    def any_of(self, flags: Sequence[bool], device: torch.device, what: str) -> list[bool]:
        """Return for each flag whether it is set on any rank. All ranks must call.

        Args:
            flags: as many on all ranks.
            device: where the ranks communicate.
            what: the flags say.
        """
        unset = torch.tensor([not each for each in flags], dtype=torch.uint8, device=device)
        return [not each for each in self.least(unset, what).tolist()]

    def begin_exchange(
        self, sent: Tensor, numels: Sequence[Sequence[int]], what: str, names: Sequence[str]
    ) -> tuple[Tensor, Pending]:
        """Begin to send each rank of the shard group its part of a flat tensor, and to take in what it is sent.

        Args:
            sent: the parts for all ranks end to end, in rank order.
            numels: elements that rank i sends rank j, as `numels[i][j]`; equal on all ranks.
            what: the parts are, such as "gradients to owners".
            names: of the parameters; ranks whose names differ get an error.

        Returns:
            The parts from all ranks end to end, in rank order, which are there once the second value is finished.
        """
        received = sent.new_empty(sum(row[self.rank] for row in numels))
        num_bytes = sent.element_size() * sum(map(sum, numels))
        labelled = label(what, names, sent.dtype, num_bytes, self.model)
        self._count([sent])
        pending = self.shard.all_to_all(sent, received, numels, labelled)
        if events.is_heard():
            pending = _told("exchange", [sent], pending, tuple(names))
        return received, pending

    def wait(self, results: Sequence[Tensor]) -> None:
        """Block until results are there; see `wait_for_results`."""
        wait_for_results(results)

    def meet(self, op: str, names: Sequence[str] = ()) -> None:
        """Return when all ranks have come to the same; before collectives that have no label."""
        for collectives in (self.shard, self.replicate):
            if collectives is not None:
                collectives.meet(label(op, names, model=self.model))

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Replace tensors by those of one rank, in place, on all ranks.

        Args:
            tensors: of any dtypes; of one size on all ranks.
            source: rank in the shard group of the first copy of the weights.
        """
        sizes = [f"a tensor of {tensor.numel()} {tensor.dtype}" for tensor in tensors]
        self.meet(f"tensors from rank {source}" if source else "weights from the first rank", sizes)
        for tensor in tensors:
            whole = tensor.contiguous()
            flat = whole.reshape(-1)
            # As bytes: not all backends know all dtypes.
            wire = (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8)
            for group, first in ((self.shard_group, source), (self.replicate_group, 0)):
                if group is not None and group.size > 1 and wire.numel():
                    dist.broadcast(wire, group=group(), group_src=first)
            if whole is not tensor:
                tensor.copy_(whole)

    def gather_small(self, tensor: Tensor, what: str) -> Tensor:
        """Return the flat tensors of all ranks that share one copy, one a row."""
        return self._rows(self.shard, tensor, self.world_size, what)

    def broadcast_from(self, whole: Tensor, source: int, name: str) -> None:
        """Replace a whole weight by that of one global rank, on all ranks.

        Args:
            whole: the weight, overwritten on all ranks but one.
            source: the global rank whose weight all get.
            name: of the weight, for errors.
        """
        self.meet(f"weight from rank {source}", (name,))
        dist.broadcast(whole, src=source)

    def sum_(self, tensor: Tensor, what: str) -> Tensor:
        """Replace a small tensor by its sum over all ranks, and wait."""
        labelled = self._label(what, (), [tensor])
        for collectives, size in self._axes():
            if size > 1:
                collectives.all_reduce([tensor.view(-1)], 1.0, labelled).finish()
        return tensor

    def least(self, tensor: Tensor, what: str) -> Tensor:
        """Return the least of all ranks' values of a small flat tensor."""
        for collectives, size in self._axes():
            if size > 1:
                tensor = self._rows(collectives, tensor, size, what).amin(dim=0)
        return tensor

    def _axes(self) -> list[tuple[Collectives, int]]:
        axes = [(self.shard, self.world_size)]
        return axes if self.replicate is None else [*axes, (self.replicate, self.num_replicas)]

    def begin(
        self,
        op: str,
        results: list[Tensor],
        pending: Pending,
        *,
        payload: Sequence[Tensor] | None = None,
        params: Sequence[str] = (),
    ) -> None:
        """Note communication that has begun, for `wait` and for those who count.

        Args:
            op: gather, reduce or sync.
            results: tensors that hold their values once it is waited for.
            pending: what to wait for.
            payload: the full tensors; default: the results.
            params: names of the parameters, for those who count.
        """
        payload = results if payload is None else payload
        self._count(payload)
        if events.is_heard():
            pending = _told(op, payload, pending, tuple(params))
        note_pending(results, pending)

    def _label(self, op: str, names: Sequence[str], tensors: Sequence[Tensor]) -> Label:
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return label(op, names, tensors[0].dtype if tensors else "", num_bytes, self.model)

    def _rows(self, collectives: Collectives, tensor: Tensor, size: int, what: str) -> Tensor:
        """Gather a small tensor of every rank of one group, one a row."""
        rows = tensor.new_empty(size, tensor.numel())
        flat = rows.view(-1)
        collectives.all_gather([tensor], [flat], self._label(what, (), [flat])).finish()
        return rows

    def _count(self, payload: Sequence[Tensor]) -> None:
        self._add(sum(t.numel() * t.element_size() for t in payload))

    def _add(self, num_bytes: int) -> None:
        again(self._add, num_bytes)
        self._num_collectives += 1
        self._num_bytes += num_bytes

    def _then_replicate(self, pending: Pending, tensors: Sequence[Tensor], what: Label) -> Pending:
        """Sum over the replicate group once the shard group has delivered."""
        replicate = self.replicate
        if replicate is None:
            return pending

        def finish() -> None:
            pending.finish()
            replicate.all_reduce(list(tensors), 1.0, what).finish()

        return Pending(finish)


def _told(op: str, payload: Sequence[Tensor], pending: Pending, params: tuple[str, ...]) -> Pending:
    """Tell recorders when this communication began, was waited for, and was done."""
    start_s, num_tensors = time.time(), len(payload)
    num_bytes = sum(t.numel() * t.element_size() for t in payload)

    def finish() -> None:
        wait_s = time.time()
        pending.finish()
        events.emit(
            events.CollectiveRan(
                op=op,
                num_tensors=num_tensors,
                num_bytes=num_bytes,
                start_s=start_s,
                wait_s=wait_s,
                end_s=time.time(),
                params=params,
            )
        )

    return Pending(finish)
