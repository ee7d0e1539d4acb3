"""DistributedDataParallel is refused around shards.

It makes parameters equal on all ranks first: rank 0's shards would be everybody's, silently.
"""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from torchloom.errors import ShardError
from torchloom.shard.roots import SHARDS


@functools.cache
def watch_wrappers() -> None:
    """Refuse the wrapper around modules that hold shards, from now on, before it changes a parameter."""
    register_module_module_registration_hook(_refuse)


def _refuse(owner: nn.Module, name: str, submodule: nn.Module) -> None:
    if not isinstance(owner, DistributedDataParallel):
        return
    if submodule is not None and any(param in SHARDS for param in submodule.parameters()):
        raise ShardError(
            "DistributedDataParallel was given a model that torchloom has sharded, and would take one rank's shards for "
            "whole weights: leave the wrapper out, as torchloom averages gradients in backward"
        )
