"""Pieces of sharded parameters that wait in host memory until they are gathered.

The parameter stays the same object with the same device, shape and dtype; only its memory moves.
All that reads it goes on to work. Gathers reload it first, and the step streams it.
"""

from __future__ import annotations

from torch import nn

from torchloom.runtime import Mover
from torchloom.shard import Layout, owners_of


def offloaded_params(layout: Layout) -> tuple[str, ...]:
    """Return the names of the parameters whose pieces can wait on the host: the sharded ones."""
    return tuple(sorted(spec.name for spec in layout.sharded))


def move_pieces(model: nn.Module, layout: Layout, mover: Mover) -> None:
    """Move this rank's pieces to the host."""
    params = owners_of(model)
    for name in offloaded_params(layout):
        host = mover.arena.device_like(params[name].data)
        mover.begin_copy("to_host", [(params[name].data, host)]).finish()
        params[name].data = host


def fetch_pieces(model: nn.Module, layout: Layout, mover: Mover) -> None:
    """Move this rank's pieces back to the device."""
    params = owners_of(model)
    for name in offloaded_params(layout):
        if mover.arena.owns(params[name].data):
            params[name].data = mover.fetch(params[name].data)
