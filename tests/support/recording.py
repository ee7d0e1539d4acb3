"""A process group that is gloo's, and writes down each collective that it is asked for.

`recording_group(coalesces=...)` makes one over all ranks, through torch's registry of backends. With
`coalesces` it says, as NCCL's does, that several tensors may travel by one collective.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

COLLECTIVES = (
    "broadcast", "allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced",
    "_allgather_base", "allgather_into_tensor_coalesced", "all_gather_single",
    "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single",
    "gather", "scatter", "reduce", "barrier", "send", "recv",
)  # fmt: skip


class Called(NamedTuple):
    """One collective."""

    name: str
    numels: tuple[int, ...]
    """Elements of each tensor of the first argument, which is what is received or replaced."""
    dtypes: tuple[str, ...]
    stream: int | None
    """The CUDA stream on which it was asked for."""


class RecordingGroup(dist.ProcessGroup):
    """Gloo's group, with a list of what was asked of it."""

    def __init__(self, inner: dist.ProcessGroup, coalesces: bool) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.coalesces = inner, coalesces
        self.calls: list[Called] = []
        self.is_silent = False
        """Whether collectives are written down alone: nothing is sent."""

    _device_types = (torch.device("cpu"),)

    def _get_backend(self, device: torch.device) -> Any:
        if self.coalesces:
            return SimpleNamespace(
                supports_coalescing=True, options=self.inner._get_backend(device).options
            )
        return self.inner._get_backend(device)

    def getBackendName(self) -> str:
        return "recording"

    @property
    def group_name(self) -> str:
        """The name under which torch knows this group; the base class would ask its backends."""
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def asked(self) -> list[str]:
        """Names of the collectives in order."""
        return [call.name for call in self.calls]


def _recorded(name: str) -> Any:
    @functools.wraps(getattr(dist.ProcessGroup, name))
    def method(self: RecordingGroup, *args: Any, **kwargs: Any) -> Any:
        tensors = [*_tensors_in(args[:1])]
        self.calls.append(
            Called(
                name,
                tuple(t.numel() for t in tensors),
                tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
                next((torch.cuda.current_stream().cuda_stream for t in tensors if t.is_cuda), None),
            )
        )
        if self.is_silent:
            return SimpleNamespace(wait=lambda: True)
        return getattr(self.inner, name)(*args, **kwargs)

    return method


def _tensors_in(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)


for _name in COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(RecordingGroup, _name, _recorded(_name))


def _create(coalesces: bool, store: Any, rank: int, size: int, timeout: Any) -> RecordingGroup:
    inner = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return RecordingGroup(inner, coalesces)


for _backend, _coalesces in (("recording", False), ("recording_coalesced", True)):
    if _backend.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            _backend, functools.partial(_create, _coalesces), devices=["cpu"]
        )


def recording_group(*, coalesces: bool) -> RecordingGroup:
    """Return a group over all ranks; all of them must call."""
    # From 2.15 torch's flight recorder files what a group does under a name that its own backends hold, and
    # this group has none.
    with mock.patch.dict(os.environ, TORCH_FR_BUFFER_SIZE="0"):
        group = dist.new_group(backend="recording_coalesced" if coalesces else "recording")
    assert isinstance(group, RecordingGroup)
    group.calls.clear()
    return group
