"""Stage 3 in eager code: autograd keeps shards, not gathered weights.

    forward    weight = gather(shard)     autograd wants to save `weight` (or a view of it)
    pack       what is saved is (shard, size, stride, offset): no bytes of the weight
    backward   the weight is gathered again where it is first needed

Compiled code reaches the same by tags on the joint graph; this is for everything else, the parts that
Dynamo leaves to Python inside of a compiled model among them. Graphs must not see it: what they save was
chosen, and what stays gathered on purpose would be gathered again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from torchloom import ops
from torchloom._torch.autograd import (
    are_saved_tensors_hooks_off,
    let_transforms_begin,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)
from torchloom._torch.compiling import DuringCompile
from torchloom.position import POSITION
from torchloom.shard.writes import WRITES


class GatherCall(NamedTuple):
    """The arguments of the gather that made a weight: enough to make it again."""

    shard: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    handle: str
    param: str

    @property
    def key(self) -> tuple[str, str]:
        """Names the weight in this process."""
        return self.handle, self.param

    def gathered(self) -> Tensor:
        """Gather the weight again, or take it from those that were gathered ahead."""
        if self.key in AHEAD:
            return AHEAD[self.key]
        with torch.no_grad():
            return ops.gather(
                self.shard.detach(),
                list(self.shape),
                self.dtype,
                self.wire_dtype,
                self.handle,
                self.param,
            )


AHEAD: dict[tuple[str, str], Tensor] = {}
"""Weights, by `GatherCall.key`, that a backward pass has gathered before an operator asked for them."""


@dataclass(frozen=True)
class _View:
    """A saved tensor, as a view of a weight that can be gathered."""

    call: GatherCall
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, call: GatherCall) -> _View:
        """Describe a tensor in the memory of the weight that a call makes."""
        return cls(
            call,
            tensor.dtype,
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def into(self, weight: Tensor) -> Tensor:
        """Return the same view of a weight that has been gathered again."""
        view = weight.new_empty(0, dtype=self.dtype)
        view.set_(weight.untyped_storage(), self.offset, self.size, self.stride)
        return view


class _Kept(NamedTuple):
    """A saved tensor that is no weight: its values without its graph, and how often it had been written.

    Autograd does not compare versions of what hooks hand out. With its graph, the result of an operator
    that saves its result (relu, softmax) would hold itself, and be freed by nobody.
    """

    values: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Kept:
        return cls(tensor.detach(), tensor._version)

    def unchanged(self) -> Tensor:
        """Return the values.

        Raises:
            RuntimeError: something has been written into them since.
        """
        if self.values._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {list(self.values.shape)} is at version {self.values._version}; expected "
                f"version {self.version} instead. torch.autograd.set_detect_anomaly(True) shows the operation "
                "whose gradient needs it"
            )
        return self.values


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

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Bracket a forward pass whose saved weights become shards."""
        self._enabled += 1
        outer = top_saved_tensors_hooks()
        # Inside of the pass of another model, such as a student's of its teacher, or of a transform.
        if _is_ours(outer) or are_saved_tensors_hooks_off():
            hooks: AbstractContextManager[Any] = contextlib.nullcontext()
        else:
            own = _Hooks(self, outer)
            hooks = torch.autograd.graph.saved_tensors_hooks(own.pack, own.unpack)
        try:
            with hooks:
                yield
        finally:
            self._enabled -= 1
            if not self._enabled:
                self._by_address.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what a block saves as it is, inside of a forward pass too."""
        enabled, by_address = self._enabled, self._by_address
        self._enabled, self._by_address = 0, {}
        hooks = top_saved_tensors_hooks()
        own = hooks if _is_ours(hooks) else None
        if own is not None:
            pop_saved_tensors_hooks()
        try:
            yield
        finally:
            if own is not None:
                push_saved_tensors_hooks(own)
            self._enabled, self._by_address = enabled, by_address

    def apart(self, graph: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls a compiled graph such that a forward pass leaves what it saves alone."""

        def run(*args: Any) -> Any:
            if not self._enabled:
                return graph(*args)
            with self.paused():
                return graph(*args)

        return run

    def calls_of(self, weights: Iterable[Tensor]) -> list[GatherCall]:
        """Return how to make weights again that autograd would save as shards now."""
        if not _is_ours(top_saved_tensors_hooks()):
            return []
        return [view.call for view in map(self.shard_of, weights) if view is not None]

    def shard_of(self, tensor: Tensor) -> _View | None:
        """Return how to make a tensor again, if it is a weight that was gathered in this pass."""
        if not self._by_address or tensor.layout is not torch.strided or not tensor.numel():
            return None
        # Tangents that forward-mode AD need not store; views that are read conjugated or negated.
        if tensor._is_zerotensor() or tensor.is_conj() or tensor.is_neg():
            return None
        found = self._by_address.get(tensor.untyped_storage().data_ptr())
        if found is None or found[0].expired():
            return None
        return _View.of(tensor, found[1])


@dataclass(frozen=True, eq=False)
class _Hooks:
    """What autograd asks in a forward pass; what is no weight goes to whom it asked before."""

    live: LiveGathers
    outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None

    def pack(self, tensor: Tensor) -> Any:
        shard = self.live.shard_of(tensor)
        if shard is not None:
            return shard
        return _Kept.of(tensor) if self.outer is None else self.outer[0](tensor)

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _Kept):
            return saved.unchanged()
        if not isinstance(saved, _View):
            assert self.outer is not None, "others' hooks made it"
            return self.outer[1](saved)
        with torch.no_grad():
            return saved.into(saved.call.gathered())


def _is_ours(hooks: tuple[Any, Any] | None) -> bool:
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), _Hooks)


LIVE = LiveGathers()
"""The process's gathered weights; empty outside of eager stage-3 forward passes."""

_DURING_COMPILE = DuringCompile(LIVE.paused)


def _num_running(module: nn.Module) -> int:
    """Return how many calls of a module this thread is in."""
    frame, number = sys._getframe(1), 0
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:
            number += 1
        frame = frame.f_back
    return number


def _purpose() -> str:
    # Not the mode: where rank 0 alone loads a model that others build, it alone may be in eval mode.
    return "" if torch.is_grad_enabled() else "without gradients"


@contextmanager
def _eager_parts(*, regather: bool, keeps_tied: bool, number: int) -> Iterator[None]:
    """Bracket what a forward pass runs in Python: saved weights as shards, no writes, its purpose told."""
    # Writes are looked for in the passes 1, 2, 3, 4, 5, 8, 9, 16, 17 and so on.
    WRITES.open(keeps_tied=keeps_tied, compares=any(n & (n - 1) == 0 for n in (number, number - 1)))
    purpose = POSITION.purpose
    POSITION.purpose = _purpose()
    saves = regather and torch.is_grad_enabled()
    try:
        with LIVE.forward_pass() if saves else contextlib.nullcontext():
            yield
    finally:
        POSITION.purpose = purpose
        WRITES.close()


def attach(root: nn.Module, regather: bool) -> tuple[RemovableHandle, ...]:
    """Bracket the eager forward passes of `root`: tied weights once, saved weights as shards, no writes.

    Returns:
        Handles of the two hooks, for removal.
    """
    let_transforms_begin(_is_ours)
    running: WeakIdKeyDictionary = WeakIdKeyDictionary()
    """What each module has open: a deep copy of `root` has these hooks, too, and may run inside of it."""
    numbers = itertools.count(1)

    def before(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        opened = running.setdefault(module, [])
        while opened and len(opened) >= _num_running(module):
            opened.pop().__exit__(
                None, None, None
            )  # torch runs no hook after a pass that e.g. KeyboardInterrupt has ended
        opened.append(_eager_parts(regather=regather, keeps_tied=True, number=next(numbers)))
        opened[-1].__enter__()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            running[module].pop().__exit__(None, None, None)

    return (
        root.register_forward_pre_hook(before),
        root.register_forward_hook(after, always_call=True),
    )


def around_compiled(
    call: Callable[..., Any],
    *,
    regather: bool,
    before: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None,
) -> Callable[..., Any]:
    """Return what calls a compiled module with the brackets of `attach` for its parts that run in Python.

    Tied weights are gathered for each use there.

    Args:
        call: the compiled module.
        regather: whether eager parts save shards for backward, not gathered weights (stage 3).
        before: called with the arguments of each call before it.
    """

    numbers = itertools.count(1)

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(args, kwargs)
        if regather and torch.is_grad_enabled():
            _DURING_COMPILE.install()  # derivatives that forward takes cannot be traced under hooks
        with _eager_parts(regather=regather, keeps_tied=False, number=next(numbers)):
            return call(*args, **kwargs)

    run.__torchloom_compiled__ = call  # type: ignore[attr-defined]
    return run
