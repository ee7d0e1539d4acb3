"""What takes a rank's shard for the whole weight while ranks communicate is refused: collectives, and DistributedDataParallel.

A broadcast would make rank 0's shards everybody's, and an average would mix parts of a weight that have nothing to do with
each other, silently. DistributedDataParallel does both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from torchloom._torch.collectives import watch_collectives
from torchloom.errors import ShardError
from torchloom.shard.beside import shard_behind
from torchloom.shard.outside import OutsideWeight
from torchloom.shard.parameter import is_shard, name_of
from torchloom.shard.roots import layout_of, sharded_models

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


def _check_gradient(collective: str, tensor: Tensor) -> None:
    name = _gradients().get(tensor.data_ptr())
    if name is not None:
        raise ShardError(
            f"{collective} was given the gradient of this rank's shard of {name!r}, which is the mean over all ranks already, and "
            "ranks hold unlike parts of it: leave it out"
        )


def _gradients() -> dict[int, str]:
    """Return the names of parameters that hold a shard, by where their gradients lie in memory."""
    found: dict[int, str] = {}
    for model in sharded_models():
        params = dict(model.named_parameters())
        grads = (
            (spec.name, params[spec.name].grad)
            for spec in layout_of(model).sharded
            if spec.name in params
        )
        found.update(
            {grad.data_ptr(): name for name, grad in grads if grad is not None and grad.numel()}
        )
    return found


def _check(collective: str, tensors: Iterable[Tensor]) -> None:
    for each in tensors:
        name = name_of(each) if is_shard(each) else shard_behind(each)
        if name is not None:
            raise ShardError(
                f"{collective} was given this rank's shard of the parameter {name!r}, and ranks hold unlike parts of it: "
                "leave it out, as torchloom keeps weights equal on all ranks; for whole weights use "
                "torchloom.shard.full_state_dict(model), for this rank's part torchloom.shard.local_shard(p)"
            )
        if collective in _WRITING and type(each) is Tensor and each.layout == torch.strided:
            _check_gradient(collective, each)
        if isinstance(each, OutsideWeight) and each.param is None and collective in _WRITING:
            raise ShardError(
                f"{collective} would write into a gathered copy of the parameter {each.param_name!r}, and the weight would stay "
                "as it is: leave it out, as torchloom keeps weights equal on all ranks, or write inside "
                "torchloom.shard.gathered(..., modifier_rank=0)"
            )
