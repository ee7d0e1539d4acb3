"""What traces rely on and Dynamo puts no guard on, as guards.

In a process that lives such things rarely change. A stored program meets edited files, where they do: so they
become facts like all others.
"""

from __future__ import annotations

import collections
import decimal
import dis
import functools
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from torchloom._torch.places import GuardOn

_METHODS = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
)
_CATCH = frozenset({"CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"})


def unguarded(
    values: Iterable[tuple[str, Any]], codes: Sequence[types.CodeType]
) -> Iterator[GuardOn]:
    """Yield guards on methods of builtin classes and the like, and on what is not there where code would notice.

    Args:
        values: what the trace read, by its expressions.
        codes: the user's functions that were traced.
    """
    names, asked = _missed_by(codes), _texts_beside(codes, {"hasattr", "getattr"})
    keys = _texts_beside(codes, {"__dict__"})
    for source, value in values:
        for step, each in _parts(value):
            if isinstance(each, _METHODS):
                yield GuardOn("EQUALS_MATCH", f"{source}{step}")
        if isinstance(value, decimal.Decimal):
            yield GuardOn("EQUALS_MATCH", source)
        if isinstance(value, collections.deque):
            yield GuardOn("EQUALS_MATCH", f"{source}.maxlen")
        if names and type(value) is dict and all(type(key) is str for key in value):
            yield GuardOn("DICT_KEYS", source)
        wanted = asked if isinstance(value, types.FunctionType) else ()
        for name in sorted(names if _is_of_users(value) else wanted):
            if not hasattr(value, name):
                yield GuardOn("HASATTR", source, name)
        for name in sorted(keys) if _is_of_users(value) else ():
            yield GuardOn("NOT_PRESENT_IN_GENERIC_DICT", source, name)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with the step to it."""
    if isinstance(value, functools.partial):
        yield ".func", value.func
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", each) for place, each in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", each) for key, each in value.items() if type(key) in (str, int))
    elif not isinstance(value, (type, types.ModuleType)):
        yield from ((f".{name}", each) for name, each in getattr(value, "__dict__", {}).items())


def _is_of_users(value: Any) -> bool:
    own = type(value).__module__.partition(".")[0] not in ("torch", "builtins")
    return own and (isinstance(value, nn.Module) or hasattr(value, "__dict__"))


def _missed_by(codes: Sequence[types.CodeType]) -> frozenset[str]:
    """Return the attributes that code reads, if any of it catches errors: one may be caught where it is missing."""
    if not any(
        "suppress" in code.co_names
        or any(each.opname in _CATCH for each in dis.get_instructions(code))
        for code in codes
    ):
        return frozenset()
    return frozenset(name for code in codes for name in code.co_names if name.isidentifier())


def _texts_beside(codes: Sequence[types.CodeType], known: Collection[str]) -> frozenset[str]:
    """Return texts in code that uses one of some names: it may ask objects for attributes by them."""
    return frozenset(
        each
        for code in codes
        if not set(known).isdisjoint(code.co_names)
        for each in code.co_consts
        if isinstance(each, str) and each.isidentifier()
    )
