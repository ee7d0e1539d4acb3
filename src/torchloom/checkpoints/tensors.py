"""Writes tensors into files that torch.distributed.checkpoint reads.

Each rank writes one file, one tensor after the other as `torch.save` writes them. What is where
stands in `index.json` for torchloom, and in `.metadata` for others. The index is plain data:

    {name: [dtype, shape, [[offsets, sizes, file, start, length], ...]]}
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchloom._torch.dcp import StoredChunk, StoredTensor
from torchloom.checkpoints.values import dtype_of
from torchloom.errors import CheckpointError
from torchloom.shard.shard_tensor import boxes_of

Index = dict[str, list[Any]]


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
        for box in boxes_of(self.shape, self.first, self.first + self.tensor.numel()):
            begin = box.first - self.first
            yield box.offsets, self.tensor[begin : begin + math.prod(box.sizes)].view(box.sizes)


def content_of(parts: Iterable[PayloadPart], file: str, index: Index) -> Iterator[memoryview]:
    """Yield the content of a file of tensors.

    Args:
        parts: of one tensor as many as there are.
        file: name of the file.
        index: receives where each part is.
    """
    start = 0
    for part in parts:
        dtype = str(part.tensor.dtype).removeprefix("torch.")
        chunks = index.setdefault(part.key, [dtype, list(part.shape), []])[2]
        for offsets, box in part.boxes():
            content = _saved(box)
            chunks.append([list(offsets), list(box.shape), file, start, len(content)])
            start += len(content)
            yield content


def _saved(box: Tensor) -> memoryview:
    value = box.detach().cpu()
    if value.untyped_storage().nbytes() != value.nbytes or not value.is_contiguous():
        # A copy without the rest of a storage that the tensor is a view of.
        value = value.clone(memory_format=torch.contiguous_format)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()


def merged(indices: Iterable[Index]) -> Index:
    """Join what several ranks wrote of the same tensors.

    Raises:
        CheckpointError: two ranks wrote one tensor with different dtypes or shapes.
    """
    found: Index = {}
    for index in indices:
        for name, (*kind, chunks) in index.items():
            *first, joined = found.setdefault(name, [*kind, []])
            if first != kind:
                raise CheckpointError(f"the ranks hold {name!r} differently: {first} and {kind}")
            joined += chunks
    return found


def read_index(index: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return where each tensor is, from the plain data."""
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


def named_for_others(
    index: Mapping[str, StoredTensor], tied: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], StoredTensor]]:
    """Yield the tensors of an index with the path that each has in a nested state dict of other programs.

    Weights and buffers have the names of `model.state_dict()`, also each other name of a tied weight; optimizer
    states those of `{"optim": get_optimizer_state_dict(model, optimizer)}`. They stand in `.metadata` alone.

    Args:
        index: of a checkpoint, by its own names.
        tied: other names of parameters and buffers, with the names that they are kept under.
    """
    for key, stored in index.items():
        kind, _, rest = key.partition("/")
        if kind in ("model", "buffer"):
            for name in (rest, *(alias for alias, name in tied.items() if name == rest)):
                yield (name,), stored
        elif kind == "optim":
            param, _, state = rest.rpartition("/")
            yield ("optim", "state", param, state), stored
        else:
            yield (key,), stored
