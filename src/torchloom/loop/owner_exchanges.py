"""What ranks send each other around a step of owners: gradients and weights to them, weights and states from them.

A communication is one packed all-to-all of the parameters of one bucket, which all ranks must make in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchloom.checkpoints.values import Value, decode, dtype_of, value_of
from torchloom.errors import EngineError
from torchloom.loop.owners import Unit
from torchloom.runtime import Communicator, lookup
from torchloom.shard import local_shard

BUCKET_BYTES = 32 << 20
"""Of the parameters in one exchange: what each rank holds twice while it is under way is 1/N of gradients and weights."""


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


def to_owners(bucket: Sequence[Unit]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the whole weights and gradients, flat, that this rank owns, by the id of the parameter."""
    comm, rank, size = _comm_of(bucket)
    mine = [unit for unit in bucket if unit.is_mine]
    sent = [
        local_shard(part).view(-1)[: unit.numel_of(rank)]
        for unit in bucket
        for part in (unit.param, _gradient(unit))
    ]
    numels = [
        [2 * sum(unit.numel_of(i) for unit in bucket if unit.owner == j) for j in range(size)]
        for i in range(size)
    ]
    names = [unit.spec.name for unit in bucket]
    received = comm.exchange(torch.cat(sent), numels, "gradients to owners", names)
    parts = received.split([unit.numel_of(i) for i in range(size) for unit in mine for _ in "wg"])
    rows = [parts[i * 2 * len(mine) : (i + 1) * 2 * len(mine)] for i in range(size)]
    columns = [torch.cat(column) for column in zip(*rows, strict=True)]
    return {
        id(unit.param): (columns[2 * place], columns[2 * place + 1])
        for place, unit in enumerate(mine)
    }


def from_owners(bucket: Sequence[Unit], stepped: dict[int, Tensor]) -> None:
    """Write what owners have stepped into the shards of all ranks."""
    comm, rank, size = _comm_of(bucket)
    mine = [unit for unit in bucket if unit.is_mine]
    flats = {id(unit.param): _checked(unit, stepped[id(unit.param)]) for unit in mine}
    sent = [unit.part_of(flats[id(unit.param)], j) for j in range(size) for unit in mine]
    numels = [
        [sum(unit.numel_of(j) for unit in bucket if unit.owner == i) for j in range(size)]
        for i in range(size)
    ]
    names = [unit.spec.name for unit in bucket]
    empty = local_shard(bucket[0].param).new_empty(0)
    received = comm.exchange(torch.cat([empty, *sent]), numels, "weights from owners", names)
    parts = received.split([unit.numel_of(rank) for unit in bucket])
    for unit, part in zip(bucket, parts, strict=True):
        local_shard(unit.param).view(-1)[: part.numel()].copy_(part)


def state_from_owner(unit: Unit, state: Any) -> dict[str, Any] | None:
    """Return the states of one parameter, which its owner has: first what they are, then each tensor."""
    comm, device = lookup(unit.layout.handle), unit.param.device
    told = Value(None) if state is None else value_of(unit.spec.name, dict(state))
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
    return decode(tree, tensors.__getitem__)


def _comm_of(bucket: Sequence[Unit]) -> tuple[Communicator, int, int]:
    layout = bucket[0].layout
    return lookup(layout.handle), layout.rank, layout.world_size


def _gradient(unit: Unit) -> Tensor:
    grad = unit.param.grad
    assert grad is not None, unit.spec.name
    return grad


def _checked(unit: Unit, stepped: Tensor) -> Tensor:
    if stepped.numel() != unit.spec.numel or stepped.dtype != unit.spec.dtype:
        raise EngineError(
            f"the optimizer gave {unit.spec.name!r} a tensor of shape {tuple(stepped.shape)} and {stepped.dtype}, and it "
            f"has {unit.spec.shape} and {unit.spec.dtype}: an optimizer may change values alone"
        )
    return stepped.reshape(-1)
