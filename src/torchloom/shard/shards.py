"""Cutting a weight into equal padded shards and putting it together again: pure tensor functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def shard_numel_of(numel: int, world_size: int) -> int:
    """Return the number of elements of one rank's shard, padding included: equal on all ranks."""
    return -(-numel // world_size)


def cut(whole: Tensor, rank: int, shard_numel: int) -> Tensor:
    """Return rank's flat shard of `whole`: `shard_numel` elements, zero-padded at the end.

    Args:
        whole: of any shape.
        rank: whose shard to return.
        shard_numel: elements of one shard, padding included.

    Example:
        >>> cut(torch.arange(5), rank=1, shard_numel=3)
        tensor([3, 4, 0])
    """
    return slice_of(whole, shard_numel, rank).clone()


def slice_of(whole: Tensor, numel: int, rank: int) -> Tensor:
    """Return what `cut` does, but a view of the whole where nothing is padded.

    Args:
        whole: of any shape, such as a gradient that is averaged.
        numel: elements of a slice, padding included.
        rank: whose slice it is.
    """
    flat = whole.reshape(-1)[rank * numel : (rank + 1) * numel]
    missing = numel - flat.numel()
    return nn.functional.pad(flat, (0, missing)) if missing else flat


def valid_numel(numel: int, rank: int, shard_numel: int) -> int:
    """Return how many elements of rank's shard are not padding.

    Args:
        numel: elements of the whole.
        rank: whose shard it is.
        shard_numel: elements of one shard, padding included.
    """
    return max(0, min(shard_numel, numel - rank * shard_numel))


def clear_padding_(grad: Tensor, numel: int, rank: int) -> None:
    """Set to zero what a shard of a gradient holds behind the last element of the whole.

    Args:
        grad: rank's shard.
        numel: elements of the whole.
        rank: whose shard it is.
    """
    valid = valid_numel(numel, rank, grad.numel())
    if valid < grad.numel():
        grad.view(-1)[valid:].zero_()


def join(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """View the front of a flat, padded tensor as a weight of `shape`."""
    numel = 1
    for size in shape:
        numel *= size
    return flat[:numel].view(list(shape))


def pad_storage(whole: Tensor, world_size: int) -> Tensor:
    """Return a flat copy of `whole`, zero-padded to a multiple of `world_size` elements."""
    padded = shard_numel_of(whole.numel(), world_size) * world_size
    flat = torch.zeros(padded, dtype=whole.dtype, device=whole.device)
    flat[: whole.numel()].copy_(whole.reshape(-1))
    return flat


def padded_flat(whole: Tensor, world_size: int) -> Tensor:
    """View the flat padded storage that `pad_storage` made for a weight."""
    padded = shard_numel_of(whole.numel(), world_size) * world_size
    return whole.detach().as_strided((padded,), (1,), 0)
