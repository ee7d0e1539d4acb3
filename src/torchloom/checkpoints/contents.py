"""Writes the tensors of a checkpoint, and reads what it holds: facts, plain values, and tensors or parts of them.

Each rank writes one file, one tensor after the other as `torch.save` writes them, which torch.distributed.checkpoint
reads, too. What is where stands in `index.json` for torchloom, and in `.metadata` for others. The index is plain data:

    {name: [dtype, shape, [[offsets, sizes, file, start, length], ...]]}

Reading executes nothing of it: facts and values are JSON, and nothing but tensors comes out of files of tensors.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchloom._torch.dcp import StoredChunk, StoredTensor
from torchloom.checkpoints.manifest import reading
from torchloom.checkpoints.values import Wrappers, decode, dtype_of
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


_FACTS = "engine.json"
FORMAT = 3
"""Of what a checkpoint holds."""


@dataclass
class Contents:
    """One checkpoint, as one rank reads it."""

    path: Path
    index: dict[str, StoredTensor]
    """Where each tensor is."""
    facts: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    """Ranks that wrote it."""
    params: dict[str, list[int]] = field(default_factory=dict)
    """Shapes of all parameters of the model, whether stored or not."""
    trees: dict[str, Any] = field(default_factory=dict)
    """Plain values, encoded: this rank's own, where it has one."""
    own: frozenset[str] = frozenset()
    """Values of which ranks kept their own."""
    prefixes: dict[str, str] = field(default_factory=dict)
    """How names of tensors begin, in values that are this rank's own."""

    def value(self, name: str) -> Any:
        """Return a plain value: this rank's own, if it has one.

        Raises:
            CheckpointError: it cannot be read.
        """
        with reading(self.path / _FACTS, f" at {name!r}"):
            tree = self.trees[name]
        return self.fetch(name, tree)

    def fetch(self, name: str, tree: Any, wrappers: Wrappers | None = None) -> Any:
        """Return a value that is part of the tree `name`; tensors in it may be of these classes.

        Raises:
            CheckpointError: it cannot be read.
        """
        prefix = self.prefixes.get(name, "")
        with reading(self.path / _FACTS, f" at {name!r}"):
            return decode(tree, lambda key: self.whole(prefix + key), wrappers)

    def whole(self, key: str) -> Tensor:
        """Read a tensor.

        Raises:
            CheckpointError: it is not there, or cannot be read.
        """
        shape = self._entry(key).shape
        return self.part(key, 0, math.prod(shape)).reshape(shape)

    def in_order(self, key: str) -> Iterator[Tensor]:
        """Yield a tensor in the parts that ranks wrote, flat and in order.

        Raises:
            CheckpointError: it is not there, or cannot be read.
        """
        each = self._entry(key)
        for _, chunk in self._ranges(key, each):
            yield self._read(key, each, chunk)

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
        found = []
        for first, chunk in self._ranges(key, each):
            begin, end = max(start, first), min(start + numel, first + math.prod(chunk.sizes))
            if begin < end:
                found.append(self._read(key, each, chunk)[begin - first : end - first])
        missing = numel - sum(value.numel() for value in found)
        if missing:
            raise CheckpointError(
                f"{self.path}: {missing} of {numel} elements of {key!r} are in no file"
            )
        return (
            found[0] if len(found) == 1 else torch.cat([torch.empty(0, dtype=each.dtype), *found])
        )

    def _entry(self, key: str) -> StoredTensor:
        if key not in self.index:
            raise CheckpointError(f"{self.path} holds no tensor {key!r}")
        return self.index[key]

    def _ranges(self, key: str, each: StoredTensor) -> list[tuple[int, StoredChunk]]:
        """Return the boxes in order, each with the index of its first element in the flattened tensor."""
        found = []
        for chunk in each.chunks:
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
                raise CheckpointError(
                    f"{self.path}: {key!r} is cut in a way that torchloom does not"
                )
            found.append((first, chunk))
        return sorted(found)

    def _read(self, key: str, each: StoredTensor, chunk: StoredChunk) -> Tensor:
        path = self.path / chunk.file
        if Path(chunk.file).name != chunk.file:
            raise CheckpointError(f"{self.path}: {key!r} is said to be in {chunk.file!r}")
        with reading(path, f" at {key!r}"), path.open("rb") as file:
            file.seek(chunk.start)
            content = io.BytesIO(file.read(chunk.length))
            value = torch.load(content, map_location="cpu", weights_only=True)
        is_plain = type(value) is Tensor and value.layout == torch.strided
        if not is_plain or (value.dtype, tuple(value.shape)) != (each.dtype, chunk.sizes):
            raise CheckpointError(f"{path} is damaged: it holds something else than {key!r}")
        return value.reshape(-1)


def read_contents(path: Path, rank: int = 0, world_size: int = 0) -> Contents:
    """Read what a checkpoint holds, without its tensors.

    Args:
        path: the folder of one checkpoint.
        rank: whose own values to read.
        world_size: number of ranks that load; own values are those of as many, else those of rank 0.

    Raises:
        CheckpointError: it cannot be read.
    """
    with reading(path / _FACTS):
        facts = _read_json(path / _FACTS)
        version = facts["format"]
        if version != FORMAT:
            raise CheckpointError(
                f"checkpoint {str(path)!r} has format {version!r}, this version reads {FORMAT}: load it "
                "with the version of torchloom that wrote it"
            )
        contents = Contents(
            path=path,
            index=read_index(_read_json(path / "index.json")),
            facts=facts,
            world_size=int(facts["world_size"]),
            params={str(name): list(map(int, shape)) for name, shape in facts["params"].items()},
            trees=dict(facts["values"]),
            own=frozenset(facts["own"]),
        )
        if rank > 0 and world_size == contents.world_size:
            found = _read_json(path / f"rank_{rank}.json")["values"]
            own = {name: tree for name, tree in found.items() if name in contents.own}
            contents.trees.update(own)
            contents.prefixes = dict.fromkeys(own, f"rank{rank}/")
        return contents


def _read_json(path: Path) -> dict[str, Any]:
    with reading(path):
        found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(found).__name__}")
    return found
