"""Places that hold values, and how what they hold is read and put back.

Each kind of container, object and scope has one function here that makes its `Holder`. Nothing of the user's is
called: classes of one's own may do anything in `__setitem__` or `clear`, so the methods of the builtin class are used.
"""

from __future__ import annotations

import collections
import functools
import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})

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


def differs(one: Content, other: Content) -> bool:
    """Say whether contents are other objects; asking tensors for equality would be another thing."""
    return len(one) != len(other) or not all(
        is_same(a[0], b[0]) and is_same(a[1], b[1]) for a, b in zip(one, other, strict=True)
    )


def is_same(one: Any, other: Any) -> bool:
    """Say whether two values are one object, or equal numbers or texts."""
    return one is other or (type(one) is type(other) and type(one) in PLAIN and one == other)


def is_known(module: str | None) -> bool:
    """Say whether a module comes with torch or Python, or is this library's."""
    root = (module or "").partition(".")[0]
    return root in ("torch", "torchloom", "numpy") or root in sys.stdlib_module_names


def dict_holder(path: str, value: dict[Any, Any]) -> Holder:
    """Return the holder of a dict's items."""
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
    return Holder(path, read, write_attributes if is_plain else write)


def items_holder(path: str, value: Any) -> Holder:
    """Return the holder of a list's, deque's or set's items."""
    base: Any = next(kind for kind in (list, collections.deque, set) if isinstance(value, kind))

    def read() -> Content:
        return list(enumerate(base.__iter__(value)))

    def write(content: Content) -> None:
        base.clear(value)
        put = base.update if base is set else base.extend
        put(value, [each for _, each in content])

    return Holder(path, read, write, has_order=base is not set)


def slots_holder(path: str, value: Any) -> Holder:
    """Return the holder of an object's slots."""
    slots = slots_of(type(value))

    def read() -> Content:
        return [(name, read_slot(slot, value)) for name, slot in slots]

    def write(content: Content) -> None:
        for (_, slot), (_, each) in zip(slots, content, strict=True):
            if each is not ABSENT:
                slot.__set__(value, each)
            elif read_slot(slot, value) is not ABSENT:
                slot.__delete__(value)

    return Holder(path, read, write)


def class_holder(kind: type) -> Holder:
    """Return the holder of a class's attributes that are values."""

    def read() -> Content:
        return [(name, each) for name, each in vars(kind).items() if _is_data(name, each)]

    def write(content: Content) -> None:
        for name in {name for name, _ in read()} - {name for name, _ in content}:
            type.__delattr__(kind, name)
        for name, each in content:
            if vars(kind).get(name, ABSENT) is not each:
                type.__setattr__(kind, name, each)

    return Holder(kind.__qualname__, read, write)


def names_holder(path: str, scope: dict[str, Any], names: frozenset[str]) -> Holder:
    """Return the holder of some names in a scope, such as the globals that a function uses.

    Args:
        path: to the scope.
        scope: globals, or the attributes of a module.
        names: in it.
    """
    chosen = sorted(names)

    def read() -> Content:
        return [(name, scope.get(name, ABSENT)) for name in chosen]

    def write(content: Content) -> None:
        for name, each in content:
            if each is not ABSENT:
                scope[name] = each
            else:
                scope.pop(name, None)

    return Holder(path, read, write)


def cell_holder(name: str, cell: types.CellType) -> Holder:
    """Return the holder of a closure's cell."""

    def read() -> Content:
        try:
            return [(name, cell.cell_contents)]
        except ValueError:  # not filled
            return [(name, ABSENT)]

    def write(content: Content) -> None:
        if content[0][1] is not ABSENT:
            cell.cell_contents = content[0][1]

    return Holder("", read, write)


def generator_holder(path: str, value: Any) -> Holder:
    """Return the holder of the state of a generator of random numbers, Python's or torch's."""
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
    return Holder(path, read, lambda content: put(before))


def array_holder(path: str, value: Any) -> Holder:
    """Return the holder of a NumPy array's numbers."""
    before = value.copy()

    def write(content: Content) -> None:
        value[...] = before

    return Holder(path, lambda: [("", value.tobytes())], write)


@functools.cache
def slots_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the slots of a class, with their names; those of classes of torch and Python are left out."""
    return tuple(
        (name, each)
        for base in kind.__mro__
        if not is_known(base.__module__)
        for name, each in vars(base).items()
        if isinstance(each, types.MemberDescriptorType)
    )


def read_slot(slot: Any, value: Any) -> Any:
    """Return what an object has in a slot, `ABSENT` if nothing."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return ABSENT


def _is_data(name: str, value: Any) -> bool:
    """Say whether an attribute of a class is a value, and no function or other descriptor."""
    is_hidden = name.startswith(("__", "_abc_", "_torchloom_"))
    return not is_hidden and not hasattr(type(value), "__get__")
