"""What torch.distributed.checkpoint asks of a tensor that is a part of a whole one, in its own records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Place = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a part."""


def chunk_list(places: Iterable[Place]) -> list[ChunkStorageMetadata]:
    """Return the parts that a rank holds."""
    return [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in places
    ]


def write_items(
    fqn: str, places: Iterable[Place], like: torch.Tensor, size: torch.Size
) -> list[WriteItem]:
    """Return what a rank writes.

    Args:
        fqn: name of the tensor.
        places: of the parts.
        like: a tensor of their dtype.
        size: of the whole tensor.
    """
    properties = TensorProperties.create_from_tensor(like)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in chunk_list(places)
    ]
