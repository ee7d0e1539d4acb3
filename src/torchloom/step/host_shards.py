"""Shards of parameters that wait in host memory until they are gathered.

Only the parameter's memory moves: it stays the same object with the same device, shape and dtype, so
code that reads it still works. Gathers reload it first, and the optimizer step streams it.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from torchloom.pipeline.options import offloadable_params
from torchloom.runtime import Mover
from torchloom.shard import Layout, owners_of


def place_shards(model: nn.Module, layout: Layout, mover: Mover, waiting: Collection[str]) -> None:
    """Let these parameters' shards, and no others, wait on the host.

    Args:
        model: sharded.
        layout: how it is sharded.
        mover: copies between device and host.
        waiting: names of parameters.
    """
    params, chosen = owners_of(model), set(waiting)
    for name in offloadable_params(layout):
        data = params[name].data
        is_on_host = mover.arena.owns(data)
        if name in chosen and not is_on_host:
            host = mover.arena.device_like(data)
            mover.begin_copy("to_host", [(data, host)]).finish()
            params[name].data = host
        elif name not in chosen and is_on_host:
            params[name].data = mover.fetch(data)
