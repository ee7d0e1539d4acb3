"""Stage 3 in eager code: autograd keeps pieces, not gathered weights.

    forward    weight = gather(shard)     autograd wants to save `weight` (or a view of it)
    pack       what is saved is (shard, size, stride, offset): no bytes of the weight
    backward   the weight is gathered again where it is first needed

Compiled code reaches the same by tags on the joint graph; this is for everything else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from torchloom import ops
from torchloom.shard.memo import Memo
from torchloom.shard.writes import WRITES


class GatherCall(NamedTuple):
    """The arguments of the gather that made a weight: enough to make it again."""

    shard: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    handle: str
    param: str


@dataclass(frozen=True)
class _View:
    """A saved tensor, as a view of a weight that can be gathered."""

    call: GatherCall
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class LiveGathers:
    """Which storages hold gathered weights right now, and how to make them again."""

    def __init__(self) -> None:
        self._enabled = 0
        self._by_address: dict[int, tuple[StorageWeakRef, GatherCall]] = {}

    def note(self, weight: Tensor, call: GatherCall) -> None:
        """Remember how `weight` was made, while a forward pass asks for it."""
        if self._enabled and weight.numel():
            storage = weight.untyped_storage()
            self._by_address[storage.data_ptr()] = (StorageWeakRef(storage), call)

    def open(self) -> Any:
        """Enter a forward pass; returns the hooks to hand to `close`."""
        self._enabled += 1
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        return hooks

    def close(self, hooks: Any) -> None:
        """Leave a forward pass."""
        hooks.__exit__(None, None, None)
        self._enabled -= 1
        if not self._enabled:
            self._by_address.clear()

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Bracket a forward pass whose saved weights become pieces."""
        hooks = self.open()
        try:
            yield
        finally:
            self.close(hooks)

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        found = None
        if tensor.layout is torch.strided and tensor.numel():
            found = self._by_address.get(tensor.untyped_storage().data_ptr())
        if found is None or found[0].expired():
            return tensor
        return _View(found[1], tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        call = saved.call
        with torch.no_grad():
            weight = ops.gather(
                call.shard.detach(),
                list(call.shape),
                call.dtype,
                call.wire_dtype,
                call.handle,
                call.param,
            )
        return weight.as_strided(saved.size, saved.stride, saved.offset)


LIVE = LiveGathers()
"""The process's gathered weights; empty outside of eager stage-3 forward passes."""


def _num_running(module: nn.Module) -> int:
    """Return how many calls of a module this thread is in."""
    frame, number = sys._getframe(1), 0
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:
            number += 1
        frame = frame.f_back
    return number


def attach(root: nn.Module, handle: str, regather: bool) -> tuple[RemovableHandle, ...]:
    """Bracket the eager forward passes of `root`: tied weights once, saved weights as pieces, no writes.

    Returns:
        Handles of the two hooks, for removal.
    """
    open_hooks: list[tuple[Any, int]] = []

    def close() -> None:
        Memo.of(handle).close()
        hooks, start = open_hooks.pop()
        if hooks is not None:
            LIVE.close(hooks)
        WRITES.close(start)

    def before(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        while open_hooks and len(open_hooks) >= _num_running(module):
            close()  # torch runs no hook after a pass that e.g. KeyboardInterrupt has ended
        Memo.of(handle).open()
        hooks = LIVE.open() if regather and torch.is_grad_enabled() else None
        open_hooks.append((hooks, WRITES.open()))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        close()

    return (
        root.register_forward_pre_hook(before),
        root.register_forward_hook(after, always_call=True),
    )
