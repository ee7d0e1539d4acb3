"""A rank's shard as torch.distributed.checkpoint takes it: boxes of the whole tensor.

DCP takes plain tensors for copies that are equal on all ranks, and writes one of them. So state dicts of shards
hold `ShardTensor`s, which tell DCP which part of which shape they are (its protocol for tensor subclasses,
torch/distributed/_checkpointable.py). A checkpoint then has the names and whole shapes of `model.state_dict()`,
and DTensors, plain tensors and shards of any number of ranks read it.

A shard is a range of the flattened tensor. A range of an n-dimensional tensor is at most 2n - 1 boxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchloom._torch.subclasses import PLAIN_RESULTS, wrapper, writer_of_this_save
from torchloom.errors import ShardError
from torchloom.shard.layout import Layout, ParamSpec
from torchloom.shard.shards import valid_numel


class Box(NamedTuple):
    """A part of a tensor that a range of its elements fills."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int
    """Index of its first element in the flattened tensor."""


class ShardTensor(Tensor):
    """A rank's shard with the shape of the whole tensor; `local` holds its elements, flat and padded.

    State dicts hold it, `torch.distributed.checkpoint` saves it and loads into it, `load_state_dict` takes it. For
    arithmetic use `local`, or gather.
    """

    local: Tensor
    first: int
    """Index of its first element in the flattened whole."""
    end: int
    """Index behind its last element; what `local` holds beyond is padding."""
    handle: str
    """Of the communicator whose ranks hold the other shards; empty where it was read from a file."""

    __torch_function__ = PLAIN_RESULTS

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        change = _KEEPING.get(func)
        if change is None:
            raise ShardError(
                f"{func} of a rank's shard in a state dict: use its .local, the flat shard, or gather whole "
                "weights (torchloom.shard.full_state_dict)"
            )
        return change(*args, **(kwargs or {}))

    def boxes(self) -> list[Box]:
        """Return the parts of the whole tensor that this shard holds, in order."""
        return list(boxes_of(self.shape, self.first, self.end))

    def with_local(self, local: Tensor) -> ShardTensor:
        """Return a shard of the same place with other elements."""
        return shard_tensor(local, self.shape, self.first, self.end, self.handle)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ShardTensor(elements {self.first} to {self.end} of {tuple(self.shape)}, local={self.local!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        return self.with_local(self.local.clone())

    def __reduce_ex__(self, proto: Any) -> Any:
        return shard_tensor, (self.local, tuple(self.shape), self.first, self.end)

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from torchloom._torch.dcp import write_items

        boxes, writer = self.boxes(), writer_of_this_save()
        if len(boxes) > 1 and writer == "HuggingFaceStorageWriter":
            raise ShardError(
                f"{writer} keeps one part of a tensor in each file, and this rank holds {len(boxes)} parts of "
                f"{fqn!r}: save whole weights (torchloom.save_model), or use FileSystemWriter"
            )
        return write_items(fqn, [(box.offsets, box.sizes) for box in boxes], self.local, self.shape)

    def __create_chunk_list__(self) -> list[Any]:
        from torchloom._torch.dcp import chunk_list

        return chunk_list((box.offsets, box.sizes) for box in self.boxes())

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for box in self.boxes():
            if index.offset is not None and tuple(index.offset) == box.offsets:
                begin = box.first - self.first
                return self.local[begin : begin + math.prod(box.sizes)].view(box.sizes)
        raise ShardError(f"this rank holds no part of {index.fqn!r} at {index.offset}")


def shard_tensor(
    local: Tensor, shape: Sequence[int], first: int, end: int, handle: str = ""
) -> ShardTensor:
    """Return elements of a tensor as a shard that knows its place.

    Args:
        local: flat, maybe padded at its end; memory is shared with it.
        shape: of the whole tensor.
        first: index of the first element in the flattened whole.
        end: index behind the last one.
        handle: of the communicator whose ranks hold the others.
    """
    made = wrapper(ShardTensor, local, shape)
    made.local, made.first, made.end, made.handle = local, first, end, handle
    return made


def as_shard_tensor(shard: Tensor, spec: ParamSpec, layout: Layout) -> ShardTensor:
    """Return a rank's shard of a parameter, or of something of its shape, for a state dict.

    Args:
        shard: flat and padded; memory is shared with it.
        spec: of the parameter.
        layout: of the model.
    """
    first = layout.rank * spec.shard_numel
    end = first + valid_numel(spec.numel, layout.rank, spec.shard_numel)
    return shard_tensor(shard.detach(), spec.shape, first, end, layout.handle)


def local_of(value: Tensor, spec: ParamSpec, layout: Layout) -> Tensor:
    """Return the elements of a shard tensor that is given to a rank.

    Raises:
        ShardError: it is another rank's, or of another number of ranks.
    """
    if not isinstance(value, ShardTensor):
        return value
    expected = as_shard_tensor(value.local.new_empty(0), spec, layout)
    place = (tuple(value.shape), value.first, value.end)
    if place != (tuple(expected.shape), expected.first, expected.end):
        raise ShardError(
            f"the shard given for {spec.name!r} is of elements {value.first} to {value.end} of "
            f"{tuple(value.shape)}; this rank holds {expected.first} to {expected.end} of {spec.shape}: load the "
            "file of this rank and this number of ranks, or whole weights"
        )
    return value.local


def _empty(like: ShardTensor, *size: Any, **kwargs: Any) -> ShardTensor:
    if size and tuple(size[0]) != tuple(like.shape):
        raise ShardError(
            f"a shard of {tuple(like.shape)} cannot make a tensor of shape {tuple(size[0])}"
        )
    kwargs = {key: value for key, value in kwargs.items() if key in ("dtype", "device")}
    return like.with_local(torch.empty_like(like.local, **kwargs))


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, ShardTensor) or not isinstance(source, ShardTensor):
        raise ShardError("a shard in a state dict is copied from a shard alone: use its .local")
    if (source.shape, source.first, source.end) != (target.shape, target.first, target.end):
        raise ShardError("shards of different places are not copied into each other")
    target.local.copy_(source.local, non_blocking=non_blocking)
    return target


_ATEN = torch.ops.aten
_KEEPING: dict[Any, Callable[..., Any]] = {
    _ATEN.detach.default: lambda x: x.with_local(x.local.detach()),
    _ATEN.alias.default: lambda x: x.with_local(x.local),
    _ATEN.clone.default: lambda x, memory_format=None: x.with_local(x.local.clone()),
    _ATEN._to_copy.default: lambda x, **kwargs: x.with_local(
        _ATEN._to_copy.default(x.local, **kwargs)
    ),
    _ATEN.new_empty.default: _empty,
    _ATEN.empty_like.default: _empty,
    _ATEN.copy_.default: _copy,
}
"""Operators after which a shard is still one of the same place."""

torch.serialization.add_safe_globals([shard_tensor])


def boxes_of(shape: Sequence[int], first: int, end: int) -> Iterator[Box]:
    """Yield the boxes that elements `first` to `end` (exclusive) of a flattened tensor fill, in order.

    Example:
        >>> [(box.offsets, box.sizes) for box in boxes_of((4, 3), 2, 10)]
        [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if first >= end:
        return
    if len(shape) == 1:
        yield Box((first,), (end - first,), first)
        return
    inner = math.prod(shape[1:])
    row = first // inner
    if first % inner or end - first < inner:  # a part of one row
        stop = min(end, (row + 1) * inner)
        for box in boxes_of(shape[1:], first - row * inner, stop - row * inner):
            yield Box((row, *box.offsets), (1, *box.sizes), row * inner + box.first)
    else:
        num_rows = (end - first) // inner
        stop = first + num_rows * inner
        rest = tuple(shape[1:])
        yield Box((row, *[0] * len(rest)), (num_rows, *rest), first)
    yield from boxes_of(shape, stop, end)
