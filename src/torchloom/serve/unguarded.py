"""What traces rely on and Dynamo puts no guard on, as guards.

In a process that lives such things rarely change. A stored program meets edited files, where they do: so they
become facts like all others.
"""

from __future__ import annotations

import collections
import decimal
import dis
import functools
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from torchloom._torch.places import TEXT_HASHES, GuardOn
from torchloom.serve.code import has_version
from torchloom.serve.orders import asks_for_addresses, asks_for_hashes, depends_on_order

_METHODS = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
)
_ROOT = re.compile(r"[LG]\['(\w+)'\]")
_LAST = re.compile(r"(?:\.(\w+)|\['(\w+)'\])$")
_CATCH = frozenset({"CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"})
_ATTRIBUTE = frozenset({"AttributeError", "Exception", "BaseException"})
_KEY = frozenset({"KeyError", "LookupError", "Exception", "BaseException"})


def unguarded(
    values: Iterable[tuple[str, Any]], codes: Sequence[types.CodeType]
) -> Iterator[GuardOn]:
    """Yield guards on methods of builtin classes and the like, and on what is not there where code would notice.

    Args:
        values: what the trace read, by its expressions.
        codes: the user's functions that were traced.
    """
    values = list(values)
    users = [code for code in codes if not has_version(code)]
    yield from _orders(values, users)
    names, asked = _missed_by(codes, _ATTRIBUTE), _texts_beside(codes, {"hasattr", "getattr"})
    looks_up = bool(_missed_by(codes, _KEY))
    keys = _texts_beside(codes, {"__dict__"})
    for source, value in values:
        for step, each in _parts(value):
            if isinstance(each, _METHODS):
                yield GuardOn("EQUALS_MATCH", f"{source}{step}")
        if isinstance(value, decimal.Decimal):
            yield GuardOn("EQUALS_MATCH", source)
        if isinstance(value, collections.deque):
            yield GuardOn("EQUALS_MATCH", f"{source}.maxlen")
        if looks_up and type(value) is dict and all(type(key) is str for key in value):
            yield GuardOn("DICT_KEYS", source)
        is_function = isinstance(value, types.FunctionType) and not _is_known(value.__module__)
        wanted = asked if is_function else ()
        for name in sorted(names if _is_of_users(value) else wanted):
            if not hasattr(value, name):
                yield GuardOn("HASATTR", source, name)
        for name in sorted(keys) if _is_of_users(value) else ():
            yield GuardOn("NOT_PRESENT_IN_GENERIC_DICT", source, name)


def why_unstorable(codes: Iterable[types.CodeType]) -> list[str]:
    """Say what code relies on that another process has none of, one line each."""
    return [
        f"the address of an object, which {code.co_name} asks `id` for"
        for code in dict.fromkeys(codes)
        if not has_version(code) and asks_for_addresses(code)
    ]


def _orders(
    values: Sequence[tuple[str, Any]], users: Sequence[types.CodeType]
) -> Iterator[GuardOn]:
    """Yield guards on how texts hash, and on the order of sets that are gone through."""
    codes = dict.fromkeys(users)
    if any(asks_for_hashes(code) or depends_on_order(code) for code in codes):
        yield GuardOn("EQUALS_MATCH", TEXT_HASHES)
    for source, value in values:
        if isinstance(value, (set, frozenset)) and len(value) > 1:
            name = _last_name(source)
            if not name or any(depends_on_order(code, (name,)) for code in codes):
                yield GuardOn("ORDER", source)


def _last_name(source: str) -> str:
    """Return the name by which code reaches what is at a source, nothing where it has none.

    Names of attributes and keys begin with a dot.
    """
    root, last = _ROOT.fullmatch(source), _LAST.search(source)
    if root is not None:
        return root[1]
    return "" if last is None else f".{last[1] or last[2]}"


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
    if _is_known(type(value).__module__):
        return False
    return isinstance(value, nn.Module) or hasattr(value, "__dict__")


def _is_known(module: str | None) -> bool:
    """Say whether a module comes with torch or Python, which nobody edits."""
    root = (module or "").partition(".")[0]
    return root == "torch" or root in sys.stdlib_module_names


def _missed_by(codes: Sequence[types.CodeType], errors: frozenset[str]) -> frozenset[str]:
    """Return the names in code that catches some errors: one may be caught where it is missing.

    Only that code itself: with all that it calls, a model of transformers would have 50 000 facts.
    """
    return frozenset(
        name
        for code in codes
        if _catches(code, errors)
        for name in code.co_names
        if name.isidentifier()
    )


@functools.cache
def _catches(code: types.CodeType, errors: frozenset[str]) -> bool:
    if "suppress" in code.co_names:
        return True
    steps = {each.opname for each in dis.get_instructions(code)}
    if steps.isdisjoint(_CATCH):
        return False
    return not errors.isdisjoint(code.co_names)


def _texts_beside(codes: Sequence[types.CodeType], known: Collection[str]) -> frozenset[str]:
    """Return texts in code that uses one of some names: it may ask objects for attributes by them."""
    return frozenset(
        each
        for code in codes
        if not set(known).isdisjoint(code.co_names)
        for each in code.co_consts
        if isinstance(each, str) and each.isidentifier()
    )
