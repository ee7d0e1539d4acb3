"""Guards on what code asks of classes: `isinstance`, `issubclass`, members of enums, annotations.

The class of each object that a trace read is a fact already, with the classes that it inherits from. `isinstance` may
depend on more: classes that were registered with an abstract class, a protocol's methods, `__instancecheck__` of a
metaclass. The answers to these become facts.
"""

from __future__ import annotations

import abc
import dis
import enum
import re
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torchloom._torch.full_capture import GuardOn

_ASK = frozenset({"isinstance", "issubclass"})
_MATCH = "MATCH_CLASS"
_READ = frozenset(
    {"__annotations__", "signature", "get_type_hints", "get_annotations", "getfullargspec"}
)
_MOST_PAIRS = 256
"""Answers that are kept for one class that asks each object."""


def class_check_guards(
    values: Sequence[tuple[str, Any]], codes: Sequence[types.CodeType]
) -> Iterator[GuardOn]:
    """Yield guards on what is asked of classes.

    Args:
        values: what the trace read, by its expressions.
        codes: the user's functions that were traced.
    """
    names = {name for code in codes for name in (*code.co_names, *code.co_freevars)}
    asks = not _ASK.isdisjoint(names) or any(map(_matches, codes))
    reads = not _READ.isdisjoint(names)
    classes = dict[int, tuple[str, type]]()
    for source, value in values:
        if isinstance(value, type) and issubclass(value, enum.Enum):
            yield GuardOn("MEMBERS", source)
        if reads and _is_annotated(value):
            yield GuardOn("ANNOTATIONS", source)
        for step, each in _classes_in(value) if _is_asked(source, value, names) else ():
            classes.setdefault(id(each), (f"{source}{step}", each))
    if asks:
        for place, kind in classes.values():
            yield from _asked(place, kind, values)


def _is_asked(source: str, value: Any, names: Collection[str]) -> bool:
    """Return whether code has a name for what may be a class."""
    return getattr(value, "__name__", "") in names or any(
        part in names for part in re.findall(r"\w+", source)[-1:]
    )


def _matches(code: types.CodeType) -> bool:
    return any(step.opname == _MATCH for step in dis.get_instructions(code))


def _asked(place: str, kind: type, values: Sequence[tuple[str, Any]]) -> Iterator[GuardOn]:
    """Yield guards on which of some values are instances of a class, and which classes its subclasses."""
    by_object, seen = not _goes_by_class(kind), set[int]()
    for source, value in values:
        if len(seen) >= _MOST_PAIRS:
            return
        is_class = isinstance(value, type)
        key = value if is_class or by_object else type(value)
        if id(key) in seen or value is kind or isinstance(value, types.ModuleType):
            continue
        seen.add(id(key))
        yield GuardOn("SUBCLASS" if is_class else "INSTANCE", source, other=place)


def _classes_in(value: Any) -> Iterator[tuple[str, type]]:
    """Yield the classes of a value that decide by more than inheritance who belongs to them."""
    if isinstance(value, type):
        if _decides(value):
            yield "", value
    elif isinstance(value, tuple):
        yield from (
            (f"[{at}]", each)
            for at, each in enumerate(value)
            if isinstance(each, type) and _decides(each)
        )
    elif isinstance(value, types.UnionType):
        for at, each in enumerate(typing.get_args(value)):
            if isinstance(each, type) and _decides(each):
                yield f".__args__[{at}]", each


def _decides(kind: type) -> bool:
    own = type(kind)
    if own in (type, enum.EnumMeta):
        return False
    checks = (own.__instancecheck__, own.__subclasscheck__)
    return checks != (type.__instancecheck__, type.__subclasscheck__)


def _goes_by_class(kind: type) -> bool:
    """Return whether the class of an object is all that counts: abstract classes, which are no protocols."""
    return type(kind).__instancecheck__ is abc.ABCMeta.__instancecheck__


def _is_annotated(value: Any) -> bool:
    if not isinstance(value, (types.FunctionType, types.MethodType, type)):
        return False
    return value.__module__ != "builtins" and bool(getattr(value, "__annotations__", None))
