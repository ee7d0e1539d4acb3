"""The metadata file of torch.distributed.checkpoint, written and read without its own reader.

Its reader unpickles the file as it is, which runs any code that is in it. Here an unpickler admits the
records that such a file consists of, and nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed.checkpoint.metadata as records
from torch.distributed.checkpoint import filesystem

_RECORDS = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_ADMITTED: dict[tuple[str, str], Any] = {
    **{(records.__name__, name): getattr(records, name) for name in _RECORDS},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(map(str, parts)),
}


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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no metadata consists of")


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


def read_dcp_metadata(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors that a metadata file lists; nothing in it is executed.

    Raises:
        pickle.UnpicklingError: it holds something else than the records of such a file.
        OSError: it cannot be read.
        Exception: whatever damaged records make Python raise.
    """
    with path.open("rb") as file:
        return dict(_stored(_unpickled(file)))


def _unpickled(file: BinaryIO) -> Any:
    metadata = _Unpickler(file).load()
    if not isinstance(metadata, records.Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    return metadata


def _stored(metadata: Any) -> Iterator[tuple[str, StoredTensor]]:
    for name, each in metadata.state_dict_metadata.items():
        if not isinstance(each, records.TensorStorageMetadata):
            continue
        chunks = []
        for chunk in each.chunks:
            place = metadata.storage_data[records.MetadataIndex(name, chunk.offsets)]
            if place.transform_descriptors:
                raise pickle.UnpicklingError(f"{name} is stored with {place.transform_descriptors}")
            chunks.append(
                StoredChunk(
                    tuple(map(int, chunk.offsets)),
                    tuple(map(int, chunk.sizes)),
                    str(place.relative_path),
                    int(place.offset),
                    int(place.length),
                )
            )
        if not isinstance(each.properties.dtype, torch.dtype):
            raise pickle.UnpicklingError(f"{name} has no dtype")
        shape = tuple(map(int, each.size))
        yield str(name), StoredTensor(each.properties.dtype, shape, tuple(chunks))
