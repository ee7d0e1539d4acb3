"""Writes the records of torch.distributed.checkpoint: its metadata file, and what it asks of a shard."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint.metadata as records
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class StoredChunk(NamedTuple):
    """Where a part of a tensor is: `length` bytes of a file from `start` hold it as `torch.save` does."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def write_dcp_metadata(file: Any, stored: Mapping[tuple[str, ...], StoredTensor]) -> None:
    """Write what `torch.distributed.checkpoint` needs to read some tensors.

    Args:
        file: to write to.
        stored: where each is, by its path in a nested state dict.
    """
    tensors = {".".join(path): each for path, each in stored.items()}
    described = {
        name: records.TensorStorageMetadata(
            properties=records.TensorProperties(dtype=each.dtype),
            size=torch.Size(each.shape),
            chunks=[
                records.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                for c in each.chunks
            ],
        )
        for name, each in tensors.items()
    }
    places = {
        records.MetadataIndex(name, chunk.offsets): filesystem._StorageInfo(
            chunk.file, chunk.start, chunk.length
        )
        for name, each in tensors.items()
        for chunk in each.chunks
    }
    metadata = records.Metadata(
        state_dict_metadata=dict(described),
        planner_data={".".join(path): path for path in stored},
        storage_data=places,
        storage_meta=records.StorageMeta(),
    )
    pickle.dump(metadata, file)


Place = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a part."""


def chunk_list(places: Iterable[Place]) -> list[records.ChunkStorageMetadata]:
    """Return the parts that a rank holds."""
    return [
        records.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in places
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
    properties = records.TensorProperties.create_from_tensor(like)
    return [
        WriteItem(
            index=records.MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in chunk_list(places)
    ]
