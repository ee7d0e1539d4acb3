"""Stage 1: whole weights of which each rank steps a slice; during the step the parameter is the slice.

A weight lies at the front of a padded storage, so that all slices have equal length and are gathered in
place. If a user assigns new `.data`, the weight has another storage; `prepare` copies it into a padded one
before the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise

from torch import Tensor, nn

from torchloom.errors import ShardError
from torchloom.shard import Layout
from torchloom.shard.shards import join, pad_storage, padded_flat


class Slices:
    """The parameters of one model that are stepped in slices.

    Args:
        params: whole, as `shard_module` left them, by name.
        layout: of the model.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], layout: Layout) -> None:
        self._params, self._layout = dict(params), layout
        # Held, so that no other tensor can come to lie at the same address.
        self._padded = {
            name: padded_flat(param.data, layout.world_size) for name, param in params.items()
        }
        self._is_taken = False

    def prepare(self) -> None:
        """Give each weight that has been given new data a padded storage of its own.

        Raises:
            ShardError: it has another shape, or shares memory with another one.
        """
        if self._is_taken:
            return
        strangers = {
            name: param
            for name, param in self._params.items()
            if not _lies_in(param, self._padded[name])
        }
        for name, param in strangers.items():
            shape = self._layout[name].shape
            if tuple(param.shape) != shape:
                raise ShardError(
                    f"the parameter {name!r} has the shape {tuple(param.shape)} since it was given new "
                    f"data, and had {shape} when the model was sharded: write values of its own shape"
                )
        self._check_memory(strangers)
        for name, param in strangers.items():
            flat = pad_storage(param.data, self._layout.world_size)
            param.data = join(flat, param.shape)
            self._padded[name] = flat

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Let each parameter be this rank's slice inside a `with` block, without a gradient."""
        if self._is_taken:
            yield
            return
        self.prepare()
        grads = {name: param.grad for name, param in self._params.items()}
        whole = {name: param.data for name, param in self._params.items()}
        self._is_taken = True
        try:
            for name, param in self._params.items():
                param.grad = None
                param.data = self._own(name)
            yield
        finally:
            for name, param in self._params.items():
                self._take_back(name, param)
                param.grad = None
                param.data = whole[name]
                param.grad = grads[name]
            self._is_taken = False

    def split(self) -> tuple[list[str], list[Tensor], list[Tensor]]:
        """Return names, this rank's slices, and the padded weights in which they lie."""
        return (
            list(self._padded),
            [self._own(name) for name in self._padded],
            list(self._padded.values()),
        )

    def _own(self, name: str) -> Tensor:
        return self._padded[name].view(self._layout.world_size, -1)[self._layout.rank]

    def _take_back(self, name: str, param: nn.Parameter) -> None:
        """Keep what was stepped, also where an optimizer gave the parameter new data."""
        own = self._own(name)
        if not _start_alike(param, own) and param.numel() == own.numel():
            own.copy_(param.data.view(-1))

    def _check_memory(self, strangers: Mapping[str, nn.Parameter]) -> None:
        """Refuse parameters that share memory: separate storages would silently untie them."""
        if not strangers:
            return
        spans = sorted(
            (param.data_ptr(), param.data_ptr() + _extent(param), name)
            for name, param in self._params.items()
        )
        for (_, end, first), (start, _, second) in pairwise(spans):
            if start < end and (first in strangers or second in strangers):
                raise ShardError(
                    f"the parameters {second!r} and {first!r} share memory since they were given new "
                    "data: tie them before torchloom.initialize, or give each a .clone()"
                )


def slice_of(whole: Tensor, numel: int, rank: int) -> Tensor:
    """Return a rank's slice of a tensor that each rank holds: flat, with zeros behind the last element.

    Args:
        whole: such as a gradient that is averaged.
        numel: elements of a slice.
        rank: whose slice it is.
    """
    flat = whole.reshape(-1)[rank * numel : (rank + 1) * numel]
    if flat.numel() == numel:
        return flat
    return nn.functional.pad(flat, (0, numel - flat.numel()))


def _lies_in(param: Tensor, padded: Tensor) -> bool:
    """Say whether a weight is still the front of its padded storage."""
    return (
        _start_alike(param, padded)
        and param.dtype == padded.dtype
        and param.is_contiguous()
        and param.untyped_storage().nbytes() == padded.untyped_storage().nbytes()
    )


def _start_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at one place of one storage; tensors of a simulation have no addresses."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.storage_offset() == other.storage_offset()


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
