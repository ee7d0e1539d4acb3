"""A channel and a label for tests that use a transport by itself."""

from __future__ import annotations

import torch.distributed as dist

from torchloom.runtime.channel import Channel, label

W = label("test", ["w"])


def channel(name: str = "test") -> Channel:
    """Return a channel of all ranks."""
    return Channel(name, tuple(range(dist.get_world_size())))
