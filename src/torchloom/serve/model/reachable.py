"""A walk over all that a forward pass may change: what is reached from the model, and the globals that its code names.

    model ──attributes──▶ containers, objects, tensors, further modules ──▶ ...
      └──classes──▶ functions ──names──▶ globals, cells, attributes of classes and modules ──▶ ...

Nothing of the user's is called on the way: `__dict__`, slots and items are read as they are.
"""

from __future__ import annotations

import argparse
import collections
import dis
import enum
import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.serve.model.holders import (
    ABSENT,
    PLAIN,
    Holder,
    array_holder,
    cell_holder,
    class_holder,
    dict_holder,
    generator_holder,
    is_known,
    items_holder,
    names_holder,
    read_slot,
    slots_holder,
    slots_of,
)

_MOST = 100_000
"""Values that are looked into; of a model that holds more, the rest is not put back."""
_MOST_STEPS = 2
"""From a function of the model to one that it names to one that that names; code beyond is not read."""


@dataclass
class Reached:
    """Each holder and each tensor once."""

    holders: list[Holder]
    tensors: dict[str, Tensor]
    """By names for people: "buffer norm.total", "tensor cache.0"."""


def reached_from(roots: Iterable[tuple[str, Any]]) -> Reached:
    """Return what is reached from some values, by their names."""
    walk = _Walk()
    for path, value in roots:
        walk.add(path, value)
    walk.run()
    return Reached(walk.holders, walk.tensors)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds under names of its own; nothing of functions, classes and modules."""
    if isinstance(value, (type, enum.Enum, types.FunctionType, types.ModuleType)):
        return {}
    own = {str(name): each for name, each in (_attributes(value) or {}).items()}
    slots = {name: read_slot(slot, value) for name, slot in slots_of(type(value))}
    return own | {name: each for name, each in slots.items() if each is not ABSENT}


def is_own_object(value: Any) -> bool:
    """Say whether a value is an object of a class that neither torch nor Python defines, or a namespace."""
    kind = type(value)
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
        return True
    if isinstance(value, (type, enum.Enum, types.FunctionType, types.ModuleType)):
        return False
    return not is_known(kind.__module__)


class _Walk:
    def __init__(self) -> None:
        self.holders: list[Holder] = []
        self.tensors: dict[str, Tensor] = {}
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no `id` is used twice
        self._waiting: collections.deque[tuple[str, Any, str, int]] = collections.deque()

    def add(self, path: str, value: Any, kind: str = "tensor", steps: int = 0) -> None:
        if type(value) not in PLAIN and id(value) not in self._seen:
            self._seen.add(id(value))
            self._kept.append(value)
            self._waiting.append((path, value, kind, steps))

    def run(self) -> None:
        while self._waiting and len(self._seen) <= _MOST:
            self._look(*self._waiting.popleft())

    def _look(self, path: str, value: Any, kind: str, steps: int) -> None:  # noqa: C901, PLR0912 - one branch for each kind
        if isinstance(value, Tensor):
            self._put_tensor(f"{kind} {path}", value)
        elif isinstance(value, nn.Module):
            self._look_module(path, value)
        elif isinstance(value, dict):
            self.holders.append(dict_holder(path, value))
            self._add_all(path, dict.items(value), kind, steps)
        elif isinstance(value, (list, collections.deque, set)):
            self.holders.append(items_holder(path, value))
            self._add_all(path, enumerate(list(value)), kind, steps)
        elif isinstance(value, (tuple, frozenset)):
            self._add_all(path, enumerate(value), kind, steps)
        elif isinstance(value, Mapping) and is_known(type(value).__module__):
            self._add_all(path, value.items(), kind, steps)
        elif isinstance(value, functools.partial):
            self._add_all(path, enumerate((value.func, value.args, value.keywords)), kind, steps)
        elif isinstance(value, types.MethodType):
            self._add_all(path, enumerate((value.__self__, value.__func__)), kind, steps)
        elif isinstance(value, types.FunctionType):
            self._look_function(path, value, steps)
        elif isinstance(value, type):
            self._look_class(value, steps)
        elif isinstance(value, (random.Random, torch.Generator)):
            self.holders.append(generator_holder(path, value))
        elif is_array(value):
            self.holders.append(array_holder(path, value))
        elif is_own_object(value):
            self._look_object(path, value, steps)

    def _add_all(
        self, path: str, items: Iterable[tuple[Any, Any]], kind: str = "tensor", steps: int = 0
    ) -> None:
        for key, each in list(items):
            if type(each) not in PLAIN:
                self.add(_joined(path, key), each, kind, steps)

    def _put_tensor(self, name: str, tensor: Tensor) -> None:
        while name in self.tensors:
            name += "'"
        self.tensors[name] = tensor

    def _look_module(self, path: str, module: nn.Module) -> None:
        own = vars(module)
        self.holders.append(dict_holder(path, own))
        for name, kind in (("_parameters", "parameter"), ("_buffers", "buffer"), ("_modules", "")):
            tensors = own.get(name)
            if isinstance(tensors, dict):
                self._seen.add(id(tensors))
                self.holders.append(dict_holder(path, tensors))
                self._add_all(path, tensors.items(), kind)
        self._add_all(path, own.items())
        self._add_classes(type(module), 0)

    def _look_object(self, path: str, value: Any, steps: int) -> None:
        own = _attributes(value)
        if own is not None:  # an empty one may be filled
            self.holders.append(dict_holder(path, own))
            self._add_all(path, own.items(), steps=steps)
        if slots_of(type(value)):
            held = slots_holder(path, value)
            self.holders.append(held)
            self._add_all(path, held.read(), steps=steps)
        self._add_classes(type(value), steps)

    def _add_classes(self, kind: type, steps: int) -> None:
        for each in kind.__mro__:
            if not is_known(each.__module__):
                self.add(each.__qualname__, each, steps=steps)

    def _look_class(self, kind: type, steps: int) -> None:
        if is_known(kind.__module__) or issubclass(kind, enum.Enum):
            return
        for value in list(vars(kind).values()):
            for function in _functions(value):
                self.add(function.__qualname__, function, steps=steps)

        held = class_holder(kind)
        self.holders.append(held)
        self._add_all(kind.__qualname__, held.read(), steps=steps)

    def _look_function(self, path: str, function: types.FunctionType, steps: int) -> None:
        if is_known(function.__module__) or steps > _MOST_STEPS:
            return
        names, others = _names_in(function.__code__)
        self._hold_names("global", function.__globals__, names, steps + 1)
        for name in names:
            module = function.__globals__.get(name)
            if isinstance(module, types.ModuleType) and not is_known(module.__name__):
                self._hold_names(name, vars(module), names | others, steps + 1)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._hold_cell(name, cell, steps)
        self._add_all(path, enumerate((function.__defaults__, function.__kwdefaults__)))
        self.add(path, vars(function))
        wrapped = vars(function).get("__wrapped__")
        if wrapped is not None:
            self.add(path, wrapped, steps=steps)

    def _hold_names(
        self, path: str, scope: dict[str, Any], names: frozenset[str], steps: int
    ) -> None:
        self.holders.append(names_holder(path, scope, names))
        for name in sorted(names):
            value = scope.get(name)
            if not isinstance(value, types.ModuleType):
                self.add(f"{path} {name}", value, steps=steps)

    def _hold_cell(self, name: str, cell: types.CellType, steps: int) -> None:
        held = cell_holder(name, cell)
        self.holders.append(held)
        self._add_all("", held.read(), steps=steps)


def _attributes(value: Any) -> dict[str, Any] | None:
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if type(own) is dict else None


def _functions(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _functions(value.__func__)
    elif isinstance(value, property):
        for each in (value.fget, value.fset):
            yield from _functions(each)
    elif isinstance(value, functools.cached_property):
        yield from _functions(value.func)


@functools.cache
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the globals that code reads or sets, and all other names in it: attributes."""
    steps = list(dis.get_instructions(code))
    names = {each.argval for each in steps if each.opname.endswith(("_GLOBAL", "_NAME"))}
    others = set(code.co_names) - names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            inner, more = _names_in(each)
            names |= inner
            others |= more
    return frozenset(names), frozenset(others)


def is_array(value: Any) -> bool:
    """Say whether a value is an array of NumPy's that holds numbers."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def _joined(path: str, key: Any) -> str:
    text = key if isinstance(key, str) else repr(key) if type(key) in PLAIN else type(key).__name__
    return f"{path}.{text}" if path else text
