"""What ranks send each other around a step of owners: gradients and weights to them, weights and states from them.

A communication is one packed all-to-all of the parameters of one bucket, which all ranks must make in the same order.
On each of N ranks a bucket of B bytes takes, for gradients and weights, 2 B / N twice under way (sent and received) and
2 B / N where it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchloom.checkpoints.values import Value, Wrappers, decode, dtype_of, value_of
from torchloom.errors import EngineError
from torchloom.loop.owners import Unit
from torchloom.runtime import lookup
from torchloom.runtime.base import Pending
from torchloom.shard import local_shard

BUCKET_BYTES = 32 << 20
"""Of the parameters in one exchange, or of one larger parameter."""

BeginExchange = Callable[
    [str, Tensor, Sequence[Sequence[int]], str, Sequence[str]], tuple[Tensor, Pending]
]
"""Begins an all-to-all by the handle of a communicator; see `Communicator.begin_exchange`."""


def begin_exchange(
    handle: str, sent: Tensor, numels: Sequence[Sequence[int]], what: str, names: Sequence[str]
) -> tuple[Tensor, Pending]:
    """Begin an all-to-all with the other ranks; see `Communicator.begin_exchange`."""
    return lookup(handle).begin_exchange(sent, numels, what, names)


def buckets(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    """Group parameters of one model and dtype up to `BUCKET_BYTES`; each bucket is ordered by owner."""
    open_: dict[tuple[str, torch.dtype], list[Unit]] = {}
    for unit in units:
        key = unit.layout.handle, unit.spec.dtype
        bucket = open_.setdefault(key, [])
        bucket.append(unit)
        if sum(each.spec.numel for each in bucket) * unit.spec.dtype.itemsize >= BUCKET_BYTES:
            yield sorted(open_.pop(key), key=lambda each: each.owner)
    for bucket in open_.values():
        yield sorted(bucket, key=lambda each: each.owner)


class Trip:
    """Parameters of a bucket on their way to owners, and their stepped weights on the way back.

    Trip(bucket)    gradients and weights leave for owners
    arrive()        the parameters that this rank owns are whole, the others have no gradient
    turn_back()     all are shards again, as they were before; stepped weights leave for the shards
    end()           they are in the shards

    All ranks must call all of them, in the same order.

    Args:
        bucket: of `buckets`; all have a gradient.
        begin: begins an all-to-all.
    """

    def __init__(self, bucket: Sequence[Unit], begin: BeginExchange) -> None:
        self.bucket, self._begin = bucket, begin
        self.mine = [unit for unit in bucket if unit.is_mine]
        self._layout = bucket[0].layout
        self._shards: list[tuple[Unit, Tensor, Tensor | None]] = []
        """Data and gradient of each parameter while it is whole or away."""
        self._pending: Pending | None = None
        sent = [
            local_shard(part).view(-1)[: unit.numel_of(self._layout.rank)]
            for unit in bucket
            for part in (unit.param, unit.param.grad)
            if part is not None
        ]
        self._received = self._send("gradients to owners", sent, to_owner=True)

    def arrive(self) -> None:
        """Let the parameters that this rank owns be whole."""
        self._wait()
        size, num = self._layout.world_size, 2 * len(self.mine)
        numels = [unit.numel_of(i) for i in range(size) for unit in self.mine for _ in "wg"]
        parts = self._received.split(numels)
        wholes = {
            id(unit.param): [
                torch.cat(parts[at + which :: num]).view(unit.spec.shape) for which in (0, 1)
            ]
            for at, unit in zip(range(0, num, 2), self.mine, strict=True)
        }
        self._received = self._received.new_empty(0)
        for unit in self.bucket:
            param = unit.param
            self._shards.append((unit, param.data, param.grad))
            param.grad = None
            if id(param) in wholes:
                param.data, grad = wholes[id(param)]
                param.grad = grad

    def turn_back(self) -> None:
        """Let all parameters be shards again, and send what owners have stepped."""
        stepped = [_checked(unit) for unit in self.mine]
        self.undo()
        sent = [
            unit.part_of(flat, j)
            for j in range(self._layout.world_size)
            for unit, flat in zip(self.mine, stepped, strict=True)
        ]
        self._received = self._send("weights from owners", sent, to_owner=False)

    def end(self) -> None:
        """Write what owners have stepped into the shards."""
        self._wait()
        parts = self._received.split([unit.numel_of(self._layout.rank) for unit in self.bucket])
        for unit, part in zip(self.bucket, parts, strict=True):
            local_shard(unit.param).view(-1)[: part.numel()].copy_(part)

    def undo(self) -> None:
        """Let all parameters hold what they held before `arrive`."""
        for unit, data, grad in self._shards:
            unit.param.grad = None
            unit.param.data = data
            unit.param.grad = grad
        self._shards = []
        self._wait()

    def _send(self, what: str, sent: Sequence[Tensor], *, to_owner: bool) -> Tensor:
        ranks = range(self._layout.world_size)
        held = [[0 for _ in ranks] for _ in ranks]  # of each rank's shards, by their owner
        for unit in self.bucket:
            for rank in ranks:
                held[rank][unit.owner] += (1 + to_owner) * unit.numel_of(rank)
        numels = held if to_owner else [list(column) for column in zip(*held, strict=True)]
        empty = local_shard(self.bucket[0].param).new_empty(0)
        names = [unit.spec.name for unit in self.bucket]
        received, self._pending = self._begin(
            self._layout.handle, torch.cat([empty, *sent]), numels, what, names
        )
        return received

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()


def state_from_owner(unit: Unit, state: Any, wrappers: Wrappers) -> dict[str, Any] | None:
    """Return the states of one parameter, which its owner has: first what they are, then each tensor.

    Args:
        unit: the parameter.
        state: on its owner the states; None where it has none.
        wrappers: classes that tensors among them may be of.
    """
    comm, device = lookup(unit.layout.handle), unit.param.device
    name = unit.spec.name
    told = Value(None) if state is None else value_of(name, dict(state), wrappers=wrappers)
    facts = [(key, str(each.dtype)[6:], list(each.shape)) for key, each in told.tensors.items()]
    text = json.dumps([told.tree, facts]).encode()
    length = torch.tensor([len(text)], device=device)
    comm.broadcast([length], unit.owner)
    content = torch.zeros(int(length), dtype=torch.uint8)
    if unit.is_mine:
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    content = content.to(device)
    comm.broadcast([content], unit.owner)
    tree, facts = json.loads(bytes(content.tolist()))
    tensors: dict[str, Tensor] = {}
    for key, dtype, shape in facts:
        own = told.tensors[key].to(device).contiguous() if unit.is_mine else None
        tensors[key] = (
            own if own is not None else torch.empty(shape, dtype=dtype_of(dtype), device=device)
        )
        comm.broadcast([tensors[key]], unit.owner)
    return decode(tree, tensors.__getitem__, wrappers)


def _checked(unit: Unit) -> Tensor:
    stepped = unit.param.data
    if stepped.numel() != unit.spec.numel or stepped.dtype != unit.spec.dtype:
        raise EngineError(
            f"the optimizer gave {unit.spec.name!r} a tensor of shape {tuple(stepped.shape)} and {stepped.dtype}, and it "
            f"has {unit.spec.shape} and {unit.spec.dtype}: an optimizer may change values alone"
        )
    return stepped.reshape(-1)
