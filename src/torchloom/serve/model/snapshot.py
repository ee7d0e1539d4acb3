"""A snapshot of all that a forward pass may change, to put it back: building runs the model and must leave no trace.

What is put back: tensors (parameters, buffers and others), containers, and attributes of objects, classes and modules,
as far as `model.reachable` finds them. They stay the same objects. The states of torch's, Python's and NumPy's random
generators are kept apart, by `generators_kept`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.errors import ServeError
from torchloom.serve.model.holders import ABSENT, Content, differs, is_same
from torchloom.serve.model.reachable import reached_from
from torchloom.serve.model.target import Target

_MOST_BYTES = 2**28
"""Parameters in all that are copied before a run. Of more of them torch's own counter says whether they were written."""
_COPIES: ContextVar[dict[int, tuple[Tensor, Tensor]] | None] = ContextVar("copies", default=None)
"""Parameters with their copies, for as long as one program is built: runs leave them as they were."""


@contextmanager
def generators_kept() -> Iterator[None]:
    """Give torch's, Python's and NumPy's generators back the state that they had."""
    cpu, python = torch.get_rng_state(), random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextmanager
def copies_shared() -> Iterator[None]:
    """Copy each parameter once, however many states there are."""
    token = _COPIES.set({})
    try:
        yield
    finally:
        _COPIES.reset(token)


class ModelSnapshot:
    """What a forward pass may change, as it is now.

    Args:
        target: the model, or a function.
    """

    def __init__(self, target: Target) -> None:
        found = reached_from([("", target.owner), (target.name, target.function)])
        self._held = [(holder, holder.read()) for holder in found.holders]
        parameters = [each for each in found.tensors.values() if isinstance(each, nn.Parameter)]
        is_small = sum(each.numel() * each.itemsize for each in parameters) <= _MOST_BYTES
        self._tensors: list[tuple[str, Tensor, Tensor, Tensor]] = []
        """Each: name, the tensor, a view of it that keeps sizes and memory, a copy."""
        self._counted: list[tuple[str, Tensor, int]] = []
        """Parameters of which there is no copy, and how often they had been written."""
        for name, tensor in found.tensors.items():
            if isinstance(tensor, nn.Parameter) and not is_small:
                with suppress(RuntimeError):  # inference tensors have no counter
                    self._counted.append((name, tensor, tensor._version))
            elif (made := _copied(tensor)) is not None:
                self._tensors.append((name, tensor, tensor.detach(), made))

    def written(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the tensors that are not what they were, by name: what they were, and copies of what they are."""
        return {
            name: (before, tensor.detach().clone())
            for name, tensor, view, before in self._tensors
            if not _is_same(tensor, view, before)
        }

    def put(self) -> dict[str, tuple[Any, Any]]:
        """Return what attributes and containers hold that they did not hold before, by name.

        Each is what was there (`ABSENT` where nothing was), and a copy of what is there.
        """
        found: dict[str, tuple[Any, Any]] = {}
        for holder, before in self._held:
            now = holder.read()
            if not differs(before, now):
                continue
            if holder.has_order:
                found |= _news(holder.path, before, now)
            else:
                found[holder.path] = ({each for _, each in before}, {each for _, each in now})
        return found

    def restore(self) -> None:
        """Put everything back.

        Raises:
            ServeError: something was written that there is no copy of.
        """
        for holder, content in self._held:
            if differs(content, holder.read()):
                holder.write(content)
        with torch.no_grad():
            for _, tensor, view, before in self._tensors:
                if not _is_same(tensor, view, before):
                    if _place_of(tensor) != _place_of(view):
                        tensor.data = view
                    view.copy_(before)
        for name, tensor, count in self._counted:
            if tensor._version != count:
                raise ServeError(
                    f"forward writes to {name}, and building runs forward: weights of more than "
                    f"{_MOST_BYTES >> 20} MiB are not copied before, so it holds other values now. Load it again, and "
                    "keep what forward writes to in a buffer"
                )


def _news(path: str, before: Content, now: Content) -> dict[str, tuple[Any, Any]]:
    known = {repr(key): value for key, value in before}
    found = {}
    for key, value in now:
        was = known.get(repr(key), ABSENT)
        if not is_same(was, value):
            found[f"{path}.{key}" if path else str(key)] = (was, _kept(value))
    return found


def _kept(value: Any) -> Any:
    """Return a copy that stays what it is when its tensors and containers are put back."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _kept(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    return value


def _copied(tensor: Tensor) -> Tensor | None:
    """Return a copy; None of what cannot be copied and compared as a whole."""
    shared = _COPIES.get()
    if shared is not None and (found := shared.get(id(tensor))):
        return found[1]
    if tensor.layout != torch.strided or tensor.is_meta:
        return None
    try:
        made = tensor.detach().clone()
        torch.equal(made, tensor.detach())
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
    ):  # quantized ones, and classes of one's own
        return None
    if shared is not None and isinstance(tensor, nn.Parameter):
        shared[id(tensor)] = (tensor, made)
    return made


def _is_same(tensor: Tensor, view: Tensor, before: Tensor) -> bool:
    if _place_of(tensor) != _place_of(view):
        return False
    if torch.equal(view, before):
        return True
    # NaN is not equal to itself.
    return before.is_floating_point() and bool(
        ((view == before) | (view.isnan() & before.isnan())).all()
    )


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    place = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, place
