"""What a forward pass may change: all that is reached from a model, and from the globals that its code names.

    model ──attributes──▶ containers, objects, tensors, further modules ──▶ ...
      └──classes──▶ functions ──names──▶ globals, cells, attributes of classes and modules ──▶ ...

Nothing is called on the way: `__dict__`, slots and items are read as they are.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_MOST = 100_000
"""Values that are looked into; of a model that holds more, the rest is not put back."""
_MOST_STEPS = 2
"""From a function of the model to one that it names to one that that names; code beyond is not read."""
_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})
ABSENT: Any = object()
"""Stands for what is not there."""

Content = list[tuple[Any, Any]]
"""What a holder holds: keys or places, and values."""


@dataclass(frozen=True)
class Holder:
    """Something that holds values in a way that can be put back."""

    path: str
    read: Callable[[], Content]
    write: Callable[[Content], None]
    has_order: bool = True
    """Whether the keys say where a value is; sets have none."""


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


def differs(one: Content, other: Content) -> bool:
    """Say whether contents are other objects; asking tensors for equality would be another thing."""
    return len(one) != len(other) or not all(
        is_same(a[0], b[0]) and is_same(a[1], b[1]) for a, b in zip(one, other, strict=True)
    )


def is_same(one: Any, other: Any) -> bool:
    """Say whether two values are one object, or equal numbers or texts."""
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and one == other)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds under names of its own; nothing of functions, classes and modules."""
    if isinstance(value, (type, enum.Enum, types.FunctionType, types.ModuleType)):
        return {}
    own = {str(name): each for name, each in (_attributes(value) or {}).items()}
    slots = {name: _read_slot(slot, value) for name, slot in _slots(type(value))}
    return own | {name: each for name, each in slots.items() if each is not ABSENT}


def is_own_object(value: Any) -> bool:
    """Say whether a value is an object of a class that neither torch nor Python defines, or a namespace."""
    kind = type(value)
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
        return True
    if isinstance(value, (type, enum.Enum, types.FunctionType, types.ModuleType)):
        return False
    return not is_known(kind.__module__)


def is_known(module: str | None) -> bool:
    """Say whether a module comes with torch or Python, or is this library's."""
    root = (module or "").partition(".")[0]
    return root in ("torch", "torchloom", "numpy") or root in sys.stdlib_module_names


class _Walk:
    def __init__(self) -> None:
        self.holders: list[Holder] = []
        self.tensors: dict[str, Tensor] = {}
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no `id` is used twice
        self._waiting: collections.deque[tuple[str, Any, str, int]] = collections.deque()

    def add(self, path: str, value: Any, kind: str = "tensor", steps: int = 0) -> None:
        if type(value) not in _PLAIN and id(value) not in self._seen:
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
            self._hold_dict(path, value)
            self._add_all(path, dict.items(value), kind, steps)
        elif isinstance(value, (list, collections.deque, set)):
            self._hold_items(path, value)
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
            self._hold_generator(path, value)
        elif is_array(value):
            self._hold_array(path, value)
        elif is_own_object(value):
            self._look_object(path, value, steps)

    def _add_all(
        self, path: str, items: Iterable[tuple[Any, Any]], kind: str = "tensor", steps: int = 0
    ) -> None:
        for key, each in list(items):
            if type(each) not in _PLAIN:
                self.add(_joined(path, key), each, kind, steps)

    def _put_tensor(self, name: str, tensor: Tensor) -> None:
        while name in self.tensors:
            name += "'"
        self.tensors[name] = tensor

    def _look_module(self, path: str, module: nn.Module) -> None:
        own = vars(module)
        self._hold_dict(path, own)
        for name, kind in (("_parameters", "parameter"), ("_buffers", "buffer"), ("_modules", "")):
            tensors = own.get(name)
            if isinstance(tensors, dict):
                self._seen.add(id(tensors))
                self._hold_dict(path, tensors)
                self._add_all(path, tensors.items(), kind)
        self._add_all(path, own.items())
        self._add_classes(type(module), 0)

    def _look_object(self, path: str, value: Any, steps: int) -> None:
        own = _attributes(value)
        if own is not None:  # an empty one may be filled
            self._hold_dict(path, own)
            self._add_all(path, own.items(), steps=steps)
        slots = _slots(type(value))
        if slots:

            def read() -> Content:
                return [(name, _read_slot(slot, value)) for name, slot in slots]

            def write(content: Content) -> None:
                for (_, slot), (_, each) in zip(slots, content, strict=True):
                    if each is not ABSENT:
                        slot.__set__(value, each)
                    elif _read_slot(slot, value) is not ABSENT:
                        slot.__delete__(value)

            self.holders.append(Holder(path, read, write))
            self._add_all(path, read(), steps=steps)
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

        def read() -> Content:
            return [(name, each) for name, each in vars(kind).items() if _is_data(name, each)]

        def write(content: Content) -> None:
            for name in {name for name, _ in read()} - {name for name, _ in content}:
                type.__delattr__(kind, name)
            for name, each in content:
                if vars(kind).get(name, ABSENT) is not each:
                    type.__setattr__(kind, name, each)

        self.holders.append(Holder(kind.__qualname__, read, write))
        self._add_all(kind.__qualname__, read(), steps=steps)

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
        chosen = sorted(names)

        def read() -> Content:
            return [(name, scope.get(name, ABSENT)) for name in chosen]

        def write(content: Content) -> None:
            for name, each in content:
                if each is not ABSENT:
                    scope[name] = each
                else:
                    scope.pop(name, None)

        self.holders.append(Holder(path, read, write))
        for name in chosen:
            value = scope.get(name)
            if not isinstance(value, types.ModuleType):
                self.add(f"{path} {name}", value, steps=steps)

    def _hold_cell(self, name: str, cell: types.CellType, steps: int) -> None:
        def read() -> Content:
            try:
                return [(name, cell.cell_contents)]
            except ValueError:  # not filled
                return [(name, ABSENT)]

        def write(content: Content) -> None:
            if content[0][1] is not ABSENT:
                cell.cell_contents = content[0][1]

        self.holders.append(Holder("", read, write))
        self._add_all("", read(), steps=steps)

    def _hold_dict(self, path: str, value: dict[Any, Any]) -> None:
        # A class of one's own may do anything in these methods.
        base: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict

        def write(content: Content) -> None:
            base.clear(value)
            for key, each in content:
                base.__setitem__(value, key, each)

        def write_attributes(content: Content) -> None:
            """Leave what is the same where it is: other threads may look."""
            for key in value.keys() - dict(content).keys():
                del value[key]
            value.update((key, each) for key, each in content if value.get(key, ABSENT) is not each)

        def read() -> Content:
            return list(base.items(value))

        is_plain = type(value) is dict and all(type(key) is str for key in value)
        self.holders.append(Holder(path, read, write_attributes if is_plain else write))

    def _hold_items(self, path: str, value: Any) -> None:
        base: Any = next(kind for kind in (list, collections.deque, set) if isinstance(value, kind))

        def read() -> Content:
            return list(enumerate(base.__iter__(value)))

        def write(content: Content) -> None:
            base.clear(value)
            put = base.update if base is set else base.extend
            put(value, [each for _, each in content])

        self.holders.append(Holder(path, read, write, has_order=base is not set))

    def _hold_generator(self, path: str, value: Any) -> None:
        get, put = (
            (value.getstate, value.setstate)
            if isinstance(value, random.Random)
            else (value.get_state, value.set_state)
        )

        def read() -> Content:
            state = get()
            words = state.tolist() if isinstance(state, Tensor) else state
            return [("", repr(words))]

        before = get()
        self.holders.append(Holder(path, read, lambda content: put(before)))

    def _hold_array(self, path: str, value: Any) -> None:
        before = value.copy()

        def write(content: Content) -> None:
            value[...] = before

        self.holders.append(Holder(path, lambda: [("", value.tobytes())], write))


def _attributes(value: Any) -> dict[str, Any] | None:
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if type(own) is dict else None


@functools.cache
def _slots(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, each)
        for base in kind.__mro__
        if not is_known(base.__module__)
        for name, each in vars(base).items()
        if isinstance(each, types.MemberDescriptorType)
    )


def _read_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return ABSENT


def _is_data(name: str, value: Any) -> bool:
    """Say whether an attribute of a class is a value, and no function or other descriptor."""
    is_hidden = name.startswith(("__", "_abc_", "_torchloom_"))
    return not is_hidden and not hasattr(type(value), "__get__")


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
    text = key if isinstance(key, str) else repr(key) if type(key) in _PLAIN else type(key).__name__
    return f"{path}.{text}" if path else text
