"""Pieces of sharded parameters that wait in host memory until they are gathered.

The parameter stays the same object with the same device, shape and dtype; only its memory moves.
All that reads it goes on to work. Gathers reload it first, and the step streams it.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from torchloom.runtime import Mover
from torchloom.shard import Layout, owners_of


def offloaded_params(layout: Layout) -> tuple[str, ...]:
    """Return the names of the parameters whose pieces can wait on the host: the sharded ones."""
    return tuple(sorted(spec.name for spec in layout.sharded))


def piece_bytes(layout: Layout) -> int:
    """Return the bytes of all pieces that can wait on the host."""
    return sum(spec.shard_numel * spec.dtype.itemsize for spec in layout.sharded)


def place_pieces(model: nn.Module, layout: Layout, mover: Mover, waiting: Collection[str]) -> None:
    """Let these parameters' pieces, and no others, wait on the host."""
    params, chosen = owners_of(model), set(waiting)
    for name in offloaded_params(layout):
        data = params[name].data
        is_on_host = mover.arena.owns(data)
        if name in chosen and not is_on_host:
            host = mover.arena.device_like(data)
            mover.begin_copy("to_host", [(data, host)]).finish()
            params[name].data = host
        elif name not in chosen and is_on_host:
            params[name].data = mover.fetch(data)
