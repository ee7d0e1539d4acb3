"""Tensors in files that torch.distributed.checkpoint reads, and parts of them back.

Each rank writes one file, one tensor after the other as `torch.save` writes them. What is where
stands in `index.json` for torchloom, and in `.metadata` for others.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from torchloom._torch.dcp import StoredChunk, StoredTensor
from torchloom.checkpoints.manifest import SummedFile, reading
from torchloom.checkpoints.values import dtype_of
from torchloom.errors import CheckpointError
from torchloom.shard.shard_tensor import boxes_of


@dataclass(frozen=True)
class PayloadPart:
    """A tensor of the checkpoint, or the range of its elements that this rank writes."""

    key: str
    tensor: Tensor
    """With the shape of the whole, or flat."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first: int = 0
    """Index of the first element in the flattened whole."""

    def boxes(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield the boxes of the whole that its elements fill, each with its offsets, in order."""
        if self.tensor.shape == self.shape:
            yield (0,) * len(self.shape), self.tensor
            return
        numel = self.tensor.numel()
        for box in boxes_of(self.shape, self.first, self.first + numel):
            begin = box.first - self.first
            yield box.offsets, self.tensor[begin : begin + math.prod(box.sizes)].view(box.sizes)


def write_parts(file: SummedFile, parts: Iterable[PayloadPart]) -> dict[str, StoredTensor]:
    """Append parts to a file, of one tensor as many as there are; return where each is.

    Raises:
        OSError: the file cannot be written, e.g. because the disk is full.
    """
    found: dict[str, StoredTensor] = {}
    for part in parts:
        before = found[part.key].chunks if part.key in found else ()
        chunks = tuple(_write_box(file, offsets, box) for offsets, box in part.boxes())
        found[part.key] = StoredTensor(part.tensor.dtype, part.shape, before + chunks)
    return found


def _write_box(file: SummedFile, offsets: tuple[int, ...], box: Tensor) -> StoredChunk:
    # A copy without the rest of a storage that the tensor may be a view of.
    value = box.detach().cpu()
    if value.untyped_storage().nbytes() != value.nbytes or not value.is_contiguous():
        value = value.clone(memory_format=torch.contiguous_format)
    start = file.size
    try:
        torch.save(value, cast(Any, _Appending(file)))
    except Exception:  # torch turns a file's error into a RuntimeError or OSError
        if file.error is not None:
            raise file.error from None  # torch says "unexpected pos" of a full disk
        raise
    return StoredChunk(offsets, tuple(value.shape), file.path.name, start, file.size - start)


class _Appending(io.RawIOBase):
    """Lets `torch.save` write at the end of a file, as if that were a file of its own."""

    def __init__(self, file: SummedFile) -> None:
        super().__init__()
        self._to = file

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return self._to.write(content)


def to_json(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return an index as plain lists."""
    return {
        name: [
            str(each.dtype).removeprefix("torch."),
            list(each.shape),
            [list(c) for c in each.chunks],
        ]
        for name, each in tensors.items()
    }


def from_json(index: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the index that `to_json` made."""
    return {
        name: StoredTensor(
            dtype_of(dtype),
            tuple(map(int, shape)),
            tuple(
                StoredChunk(tuple(offsets), tuple(sizes), str(file), int(start), int(length))
                for offsets, sizes, file, start, length in chunks
            ),
        )
        for name, (dtype, shape, chunks) in index.items()
    }


def merged(indices: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Join what several ranks wrote of the same tensors.

    Raises:
        CheckpointError: two ranks wrote one tensor with different dtypes or shapes.
    """
    facts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    chunks: dict[str, list[StoredChunk]] = {}
    for index in indices:
        for name, each in index.items():
            dtype, shape = facts.setdefault(name, (each.dtype, each.shape))
            if (dtype, shape) != (each.dtype, each.shape):
                raise CheckpointError(
                    f"the ranks hold {name!r} differently: {dtype} {list(shape)} and {each.dtype} "
                    f"{list(each.shape)}"
                )
            chunks.setdefault(name, []).extend(each.chunks)
    return {name: StoredTensor(*facts[name], tuple(found)) for name, found in chunks.items()}


class _Region(io.RawIOBase):
    """Lets `torch.load` read a part of a file, straight into the tensor's memory."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        done = 0
        while done < len(view):  # the system reads at most 2 GiB at a time
            num = self._file.readinto(view[done:])
            if not num:
                break
            done += num
        self._at += done
        return done


class Payload:
    """Reads tensors of one checkpoint; nothing but tensors comes out of its files."""

    def __init__(self, folder: Path, index: Mapping[str, StoredTensor]) -> None:
        self.folder, self.index = folder, index

    def __contains__(self, key: object) -> bool:
        return key in self.index

    def whole(self, key: str) -> Tensor:
        """Read a tensor.

        Raises:
            CheckpointError: it is not there, or cannot be read.
        """
        shape = self._entry(key).shape
        return self.part(key, 0, math.prod(shape)).reshape(shape)

    def ranges(self, key: str) -> list[tuple[int, int]]:
        """Return the ranges of the flattened tensor that were written, in order: first element and number.

        Raises:
            CheckpointError: it is not there, or was cut otherwise.
        """
        each = self._entry(key)
        return sorted((self._first(key, each, c), math.prod(c.sizes)) for c in each.chunks)

    def part(self, key: str, start: int, numel: int) -> Tensor:
        """Read `numel` elements of a tensor, flat, which any number of ranks may have written.

        Args:
            key: name of the tensor in the checkpoint.
            start: index of the first element in the flattened tensor.
            numel: number of elements.

        Raises:
            CheckpointError: they are not there, or cannot be read.
        """
        each = self._entry(key)
        firsts = [self._first(key, each, chunk) for chunk in each.chunks]
        for first, chunk in zip(firsts, each.chunks, strict=True):  # one may hold all: no copy
            if numel and first <= start and start + numel <= first + math.prod(chunk.sizes):
                value = self._read(key, each, chunk).reshape(-1)
                return value[start - first : start - first + numel]
        result = torch.empty(numel, dtype=each.dtype)
        missing = numel
        for first, chunk in zip(firsts, each.chunks, strict=True):
            begin, end = max(start, first), min(start + numel, first + math.prod(chunk.sizes))
            if begin < end:
                value = self._read(key, each, chunk).reshape(-1)
                result[begin - start : end - start] = value[begin - first : end - first]
                missing -= end - begin
        if missing > 0:
            raise CheckpointError(
                f"{self.folder}: {missing} of {numel} elements of {key!r} are in no file"
            )
        return result

    def _first(self, key: str, each: StoredTensor, chunk: StoredChunk) -> int:
        """Return the index of a box's first element in the flattened tensor, where the box is a range of it."""
        first, inner, is_full = 0, 1, True
        is_range = len(chunk.offsets) == len(chunk.sizes) == len(each.shape)
        for offset, size, whole in zip(
            reversed(chunk.offsets), reversed(chunk.sizes), reversed(each.shape), strict=False
        ):
            is_range &= (is_full or size == 1) and 0 <= offset <= offset + size <= whole
            is_full &= size == whole
            first += offset * inner
            inner *= whole
        if not is_range:
            raise CheckpointError(f"{self.folder}: {key!r} is cut in a way that torchloom does not")
        return first

    def _entry(self, key: str) -> StoredTensor:
        if key not in self.index:
            raise CheckpointError(f"{self.folder} holds no tensor {key!r}")
        return self.index[key]

    def _read(self, key: str, each: StoredTensor, chunk: StoredChunk) -> Tensor:
        path = self.folder / chunk.file
        if Path(chunk.file).name != chunk.file:
            raise CheckpointError(f"{self.folder}: {key!r} is said to be in {chunk.file!r}")
        with reading(path, f" at {key!r}"), path.open("rb", buffering=0) as file:
            region: Any = _Region(file, chunk.start, chunk.length)
            value = torch.load(region, map_location="cpu", weights_only=True, mmap=False)
        if (
            type(value) is not Tensor
            or value.layout != torch.strided
            or value.dtype != each.dtype
            or tuple(value.shape) != chunk.sizes
        ):
            raise CheckpointError(f"{path} is damaged: it holds something else than {key!r}")
        return value
