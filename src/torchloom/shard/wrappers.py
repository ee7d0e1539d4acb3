"""What takes a rank's shard for the whole weight while ranks communicate is refused: collectives, and DistributedDataParallel.

A broadcast would make rank 0's shards everybody's, and an average would mix parts of a weight that have nothing to do with
each other, silently. DistributedDataParallel does both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from torchloom._torch.distributed import watch_collectives
from torchloom.errors import ShardError
from torchloom.shard.direct_uses import shard_behind
from torchloom.shard.parameter import is_shard, refused_collective
from torchloom.shard.writes import WeightCopy

_WRITING = frozenset(["broadcast", "allreduce", "allreduce_coalesced", "reduce", "recv"])


@functools.cache
def watch_wrappers() -> None:
    """Refuse both for modules that hold shards, from now on, before a parameter is changed."""
    register_module_module_registration_hook(_refuse)
    watch_collectives(_check)


def _refuse(owner: nn.Module, name: str, submodule: nn.Module) -> None:
    if not isinstance(owner, DistributedDataParallel):
        return
    if submodule is not None and any(map(is_shard, submodule.parameters())):
        raise ShardError(
            "DistributedDataParallel was given a model that torchloom has sharded, and would take one rank's shards for "
            "whole weights: leave the wrapper out, as torchloom averages gradients in backward"
        )


def _check(collective: str, tensors: Iterable[Tensor]) -> None:
    for each in tensors:
        shard = each if is_shard(each) else shard_behind(each)
        if shard is not None:
            raise refused_collective(collective, shard)
        if isinstance(each, WeightCopy) and each.param is None and collective in _WRITING:
            raise ShardError(
                f"{collective} would write into a gathered copy of the parameter {each.param_name!r}, and the weight would stay "
                "as it is: leave it out, as torchloom keeps weights equal on all ranks, or write inside "
                "torchloom.shard.gathered(..., modifier_rank=0)"
            )
