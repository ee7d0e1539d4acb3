"""A snapshot of what a forward pass may change, to put it back: building runs the model and must leave no trace.

Put back are buffers and other tensors, the attributes of modules and objects, and containers in these, four levels deep.
What forward writes to weights, globals and closures is an error. The states of torch's, Python's and NumPy's random generators are kept
apart, by `generators_kept`.
"""

from __future__ import annotations

import collections
import dis
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.bytecode import nested
from torchloom.errors import ServeError
from torchloom.serve.model.target import Target

_DEPTH = 4
"""Levels of attributes and containers, from a module on, that are put back."""
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list, set, collections.deque)
_OF_MODULES = ("_parameters", "_buffers", "_modules")

ABSENT: Any = object()
"""Stands for what is not there."""

Content = list[tuple[Any, Any]]


@contextmanager
def generators_kept() -> Iterator[None]:
    """Give torch's, Python's and NumPy's generators back the state that they had."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


class ModelSnapshot:
    """What a forward pass may change, as it is now.

    Args:
        target: the model, or a function.
    """

    def __init__(self, target: Target) -> None:
        self._seen: dict[int, Any] = {}
        self._held: list[tuple[str, Any, Content]] = []
        """Attributes and containers: name, what holds them, what was in it."""
        self._watched: list[tuple[str, Callable[[], Content], Content]] = []
        """What forward may not write: globals, closures, weights; name, how it is read, what was there."""
        self._copied: list[tuple[str, Tensor, Tensor, Tensor]] = []
        """Each: name, the tensor, a view of it that keeps sizes and memory, a copy."""
        self._add("", target.owner, _DEPTH)
        self._watch_names(target.function)
        kinds = {type(target.owner), *map(type, target.module.modules() if target.module else ())}
        for base in {base for kind in kinds for base in kind.__mro__}:
            for each in vars(base).values():
                self._watch_names(each)

    def written(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the tensors that are not what they were, by name: what they were, and copies of what they are."""
        return {
            name: (before, tensor.detach().clone())
            for name, tensor, view, before in self._copied
            if not _is_same(tensor, view, before)
        }

    def put(self) -> dict[str, tuple[Any, Any]]:
        """Return what attributes and containers hold that they did not hold before, by name.

        Each is what was there (`ABSENT` where nothing was), and what is there.
        """
        found: dict[str, tuple[Any, Any]] = {}
        for path, holder, before in self._held:
            known = dict(before)
            for key, value in _content(holder):
                was = known.get(key, ABSENT)
                if _differs([(key, was)], [(key, value)]):
                    found[_joined(path, key)] = (was, value)
        return found

    def restore(self) -> None:
        """Put everything back.

        Raises:
            ServeError: something was written that cannot be put back.
        """
        for _, holder, content in self._held:
            if _differs(content, _content(holder)):
                _write(holder, content)
        with torch.no_grad():
            for _, tensor, view, before in self._copied:
                if not _is_same(tensor, view, before):
                    if _place_of(tensor) != _place_of(view):
                        tensor.data = view
                    view.copy_(before)
        written = [name for name, read, content in self._watched if _differs(content, read())]
        if written:
            raise ServeError(
                f"forward writes to {written[0]}, and building runs forward, but puts back only buffers and attributes "
                "of the model: keep it in one of these, or call the model once before if its first call alone writes it"
            )

    def _add(self, path: str, value: Any, left: int) -> None:
        """Keep a value, and what is in it for some levels more."""
        self._watch_names(value)
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        holder = _holder(value)
        if isinstance(value, Tensor):
            self._add_tensor(path, value)
        elif isinstance(value, tuple):
            for key, each in enumerate(value):
                self._add(_joined(path, key), each, left)
        elif holder is not None and left:
            self._held.append((path, holder, _content(holder)))
            for key, each in _content(holder):
                inner = path if key in _OF_MODULES else _joined(path, key)
                self._add(
                    inner, each, _DEPTH if isinstance(each, nn.Module) else left - (inner != path)
                )

    def _add_tensor(self, path: str, tensor: Tensor, *, is_watched: bool = False) -> None:
        # Inference tensors have no counter; quantized and sparse ones cannot all be copied and compared.
        with suppress(RuntimeError, NotImplementedError, TypeError):
            if is_watched or isinstance(tensor, nn.Parameter):
                self._note(path, lambda: [("", tensor._version)])
            elif tensor.layout == torch.strided and not tensor.is_meta:
                view, made = tensor.detach(), tensor.detach().clone()
                _is_same(tensor, view, made)  # raises for kinds that cannot be compared afterwards
                self._copied.append((path, tensor, view, made))

    def _note(self, name: str, read: Callable[[], Content]) -> None:
        self._watched.append((name, read, read()))

    def _watch_names(self, function: Any, steps: int = 2) -> None:
        """Watch the globals and closures of a function, and of functions that it names."""
        if not isinstance(function, types.FunctionType) or id(function) in self._seen or not steps:
            return
        self._seen[id(function)] = function
        self._watch_names(vars(function).get("__wrapped__"), steps)
        scope, code = function.__globals__, function.__code__
        if _is_known(scope.get("__name__", "")):
            return
        for name in _globals_in(code):
            self._watch(f"global {name}", partial(scope.get, name, ABSENT), steps)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._watch(f"closure's {name}", partial(getattr, cell, "cell_contents", None), steps)

    def _watch(self, name: str, read: Callable[[], Any], steps: int) -> None:
        """Watch a name and what it stands for; modules and objects are kept as the model's own."""
        value = read()
        self._note(name, lambda: [("", read())])
        if isinstance(value, types.FunctionType):
            self._watch_names(value, steps - 1)
        elif isinstance(value, Tensor) and id(value) not in self._seen:
            self._add_tensor(name, value, is_watched=True)
        elif isinstance(value, _CONTAINERS):
            self._note(name, partial(_content, value))
        else:
            self._add(name, value, _DEPTH)


def _is_known(module: str) -> bool:
    """Say whether a module comes with torch or Python, or is this library's."""
    root = module.partition(".")[0]
    return root in ("torch", "torchloom", "numpy") or root in sys.stdlib_module_names


@functools.cache
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that code reads or sets."""
    steps = (step for each in nested(code) for step in dis.get_instructions(each))
    return tuple(dict.fromkeys(step.argval for step in steps if step.opname.endswith("_GLOBAL")))


def _holder(value: Any) -> Any:
    """Return the container that holds what is in a value: itself, or its attributes; None if there is none."""
    if isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, (nn.Module, types.SimpleNamespace)):
        return vars(value)
    is_own = not _is_known(type(value).__module__) and not isinstance(
        value, (type, types.ModuleType)
    )
    return getattr(value, "__dict__", None) if is_own else None


def _content(holder: Any) -> Content:
    return list(dict.items(holder) if isinstance(holder, dict) else enumerate(holder))


def _write(holder: Any, content: Content) -> None:
    """Put back what a container held; what is the same in a dict stays where it is: other threads may look."""
    if isinstance(holder, dict):
        before = dict(content)
        for key in [key for key in holder if key not in before]:
            del holder[key]
        holder.update(before)
    else:
        holder.clear()
        put = holder.update if isinstance(holder, set) else holder.extend
        put([each for _, each in content])


def _differs(one: Content, other: Content) -> bool:
    """Say whether contents are other objects; asking tensors for equality would be another thing."""
    return len(one) != len(other) or not all(
        a[0] == b[0]
        and (a[1] is b[1] or (type(a[1]) is type(b[1]) and type(a[1]) in _PLAIN and a[1] == b[1]))
        for a, b in zip(one, other, strict=True)
    )


def _joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_same(tensor: Tensor, view: Tensor, before: Tensor) -> bool:
    if _place_of(tensor) != _place_of(view):
        return False
    # NaN is not equal to itself.
    return bool(((view == before) | ((view != view) & (before != before))).all())


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    place = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, place
