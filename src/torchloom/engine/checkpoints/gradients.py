"""Gradients that waited for more micro-steps when a checkpoint was saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from torchloom.engine.checkpoints.contents import Contents
from torchloom.engine.checkpoints.trained import Trained
from torchloom.engine.checkpoints.weights import reader
from torchloom.shard import layout_of
from torchloom.shard.shards import cut


def read_gradients(
    engine: Trained, contents: Contents, factor: float
) -> Iterator[Callable[[], object]]:
    """Read the gradients that were waiting for more micro-steps; drop those that wait here.

    Local gradients are not averaged over ranks yet; if the number of ranks has changed, each rank takes
    their mean.

    Args:
        engine: whose gradients are replaced.
        contents: the checkpoint.
        factor: the loss scale now, divided by that of the checkpoint.

    Returns:
        Functions that each set one gradient; the first drops all that wait.
    """
    yield engine.local.zero_grad
    layout, same = layout_of(engine.module), contents.world_size == engine.world.world_size
    mine = contents.value("gradients")
    for each in engine.local:
        spec, key = each.spec, f"grad/{each.spec.name}"
        local = [f"rank{rank}/{key}" for rank in range(contents.world_size)]
        found = [name for name in local if name in contents.payload]
        is_local = spec.mode == "whole"
        if is_local and same and found:
            if mine.get(spec.name) == "local":
                value = contents.payload.whole(local[engine.world.rank])
                yield _set_grad(each.param, value, factor)
        elif found:
            mean = sum(contents.payload.whole(name).double() for name in found) / len(local)
            assert isinstance(mean, Tensor)
            whole = mean.to(spec.dtype)
            value = cut(whole, layout.rank, spec.shard_numel) if spec.mode == "sharded" else whole
            yield _set_grad(each.param, value, factor)
        elif key in contents.payload:
            value = torch.zeros(each.param.numel(), dtype=contents.payload.index[key].dtype)
            reader(contents, key, spec, layout, value)()
            yield _set_grad(each.param, value, factor)


def is_gradient(key: str) -> bool:
    """Say whether a tensor's name is that of a gradient."""
    return re.match(r"(rank\d+/)?grad/", key) is not None


def _set_grad(param: nn.Parameter, value: Tensor, factor: float) -> Callable[[], None]:
    fitted = value.reshape(param.shape)

    def write() -> None:
        grad = torch.empty_like(param).copy_(fitted)
        param.grad = grad if factor == 1.0 else grad.mul_(factor)

    return write
