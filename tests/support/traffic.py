"""A channel, a label and calls of operators for tests that use transports by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchloom import ops
from torchloom.memory import measure_peak
from torchloom.runtime.channel import Channel, label
from torchloom.shard.shards import shard_numel_of

W = label("test", ["w"])


def channel(name: str = "test") -> Channel:
    """Return a channel of all ranks."""
    return Channel(name, tuple(range(dist.get_world_size())))


def collectives_of(
    numels: Sequence[int], dtype: torch.dtype, wire: torch.dtype, size: int, handle: str
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield each operator that starts collectives, with arguments for weights of these sizes."""
    shard_numels = [shard_numel_of(n, size) for n in numels]
    names = [f"w{i}" for i in range(len(numels))]
    shards = [torch.randn(n, dtype=wire) for n in shard_numels]
    full = [torch.randn(n, dtype=dtype) for n in numels]
    yield ops.gather_start, (shards, names, dtype, size, handle)
    yield ops.reduce_start, (full, names, shard_numels, torch.float32, wire, handle)
    for divides in (False, True):
        yield ops.sync_start, (full, names, torch.float32, wire, divides, handle)


def held_bytes(start: Any, args: tuple[Any, ...], handle: str) -> int:
    """Return what is allocated at the highest between a start and its wait, without its results."""
    found: list[int] = []

    def run() -> None:
        results = start(*args)
        found.extend(t.untyped_storage().nbytes() for t in results)
        ops.wait_(list(results), [], handle)

    return measure_peak(run).peak_bytes - sum(found)
