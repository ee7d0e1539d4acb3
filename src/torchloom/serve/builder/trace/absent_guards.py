"""Guards on what code looks for and does not find: attributes, names of an object's own, keys.

`absent_names` says what code looks for, by its bytecode; here it is told where in what the trace read that is not there.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from torchloom._torch.full_capture import GuardOn
from torchloom.bytecode import nested
from torchloom.envs import environment
from torchloom.serve.builder.trace.absent_names import (
    Name,
    asked_for,
    asks_by_any_name,
    listed,
    missed,
    misses_keys,
    texts_of,
)
from torchloom.serve.model.functions import functions_in

_ROOT = re.compile(r"[LG]\['(\w+)'\]")


_LAST = re.compile(r"(?:\.(\w+)|\['(\w+)'\])$")


_OWN_NAMES = re.compile(r"(.+\.__dict__)\[.*")


_OF_DYNAMO = re.compile(r"G\['__(?:builtins_dict__|import_torch_dot__dynamo_)")


_HOOKS = re.compile(r".*_hooks\w*")


_IMMUTABLE, _MADE = 1 << 8, 1 << 9
"""Of `type.__flags__`: no attribute can be set, and made by a `class` statement."""


def absence_guards(
    values: Sequence[tuple[str, Any]],
    codes: Sequence[types.CodeType],
    users: Sequence[types.CodeType],
) -> Iterator[GuardOn]:
    """Yield guards on attributes, and on all names of an object's own where code lists these.

    Args:
        values: what the trace read, by its expressions.
        codes: the functions that were traced, without torch's.
        users: of these, the user's.
    """
    yield from _absent(values, codes, users)
    yield from _absent_in_methods(values, users)
    yield from _own_names(values, codes)


def missing_key_guards(
    values: Iterable[tuple[str, Any]], codes: Iterable[types.CodeType]
) -> Iterator[GuardOn]:
    """Yield guards on the keys of dicts, where code catches that a key is missing.

    Args:
        values: what the trace read, by its expressions.
        codes: the functions that were traced, without torch's.
    """
    if any(map(misses_keys, codes)):
        yield from (GuardOn("KEYS", source) for source, each in values if _has_keys(source, each))


def _absent(
    values: Sequence[tuple[str, Any]],
    codes: Sequence[types.CodeType],
    users: Sequence[types.CodeType],
) -> Iterator[GuardOn]:
    """Yield guards on attributes that code looks for and that are not there."""
    named = [(source, value, _names_of(source, value)) for source, value in values]
    known = frozenset[str]().union(*(names for _, _, names in named))
    left = set(_methods_of(value for _, value in values)).difference(codes)
    by_errors = _holders(missed(users, left), known)
    by_any_errors = by_errors | _holders(missed(codes), known)
    asked = {name for code in users for name in asked_for(code)} | _handed(values, users)
    by_asking = _holders(asked, known)
    seen = set[tuple[int, str]]()
    for source, value, names in named:
        if _OF_DYNAMO.match(source) or not _takes_attributes(source, value):
            continue
        wanted = set(by_any_errors if _is_of_users(value) else by_errors)
        is_shared = isinstance(value, _ASKED_BY_HAND)
        if is_shared:
            wanted |= by_asking
        for attribute in sorted({each for name, each in wanted if name is None or name in names}):
            if hasattr(value, attribute) or (id(value), attribute) in seen:
                continue
            if is_shared:  # once, at whatever place
                seen.add((id(value), attribute))
            is_flat = type(value) is types.ModuleType and (
                is_known(value.__name__) or not hasattr(value, "__getattr__")
            )
            kind = "NOT_PRESENT_IN_GENERIC_DICT" if is_flat else "HASATTR"
            yield GuardOn(kind, source, attribute)
            if is_flat and not hasattr(value, "__getattr__"):
                yield GuardOn(kind, source, "__getattr__")


_ASKED_BY_HAND = (types.ModuleType, types.FunctionType, types.MethodType, type)
"""What Dynamo puts no guard on where `hasattr` finds nothing."""


def _handed(values: Sequence[tuple[str, Any]], users: Sequence[types.CodeType]) -> set[Name]:
    """Return names that may reach code that asks for attributes by a name from elsewhere."""
    asking = {code: holders for code in users if (holders := asks_by_any_name(code))}
    read = {each for _, each in values if isinstance(each, str) and each.isidentifier()}
    return {
        (holder, text)
        for code, holders in asking.items()
        for text in (read | texts_of(_around(code, users)))
        for holder in holders
    }


def _absent_in_methods(
    values: Sequence[tuple[str, Any]], users: Sequence[types.CodeType]
) -> Iterator[GuardOn]:
    """Yield guards on attributes that code asks methods of objects for, which no trace reads."""
    wanted = missed(users).union(*map(asked_for, users))
    for source, value in values:
        if not _is_of_users(value):
            continue
        for holder, name in sorted((str(holder), name) for holder, name in wanted if holder):
            method = getattr(type(value), holder, None)
            if isinstance(method, types.FunctionType) and not hasattr(method, name):
                yield GuardOn("HASATTR", f"{source}.{holder}", name)


def _methods_of(values: Iterable[Any]) -> Iterator[types.CodeType]:
    """Yield code that a trace may have given up in the middle of, as it raised an error: it is not among the traced."""
    seen = set[type]()
    for value in values:
        yield from (function.__code__ for function in functions_in(value))
        for kind in type(value).__mro__:
            if kind in seen or is_known(kind.__module__):
                continue
            seen.add(kind)
            for each in list(vars(kind).values()):
                yield from (function.__code__ for function in functions_in(each))


def _names_of(source: str, value: Any) -> frozenset[str]:
    """Return by which names code may reach what is at a source."""
    names = {last_name(source).removeprefix(".")}
    if isinstance(value, types.ModuleType):
        names |= {value.__name__.partition(".")[0], value.__name__.rpartition(".")[2]}
    return frozenset(names)


def _holders(wanted: Collection[Name], names: Collection[str]) -> set[Name]:
    """Return what is looked for, of any object where nothing that was read has the name that code looks in."""
    names = {*names, "self"}  # an object, which may have another name elsewhere
    return {(holder if holder in names else None, name) for holder, name in wanted}


def _takes_attributes(source: str, value: Any) -> bool:
    if isinstance(value, type):
        return not value.__flags__ & _IMMUTABLE and bool(value.__flags__ & _MADE)
    if isinstance(value, dict) and _HOOKS.fullmatch(last_name(source)):
        return False
    return hasattr(value, "__dict__") or _is_slotted(value)


def _is_slotted(value: Any) -> bool:
    kind = type(value)
    return not is_known(kind.__module__) and any("__slots__" in vars(each) for each in kind.__mro__)


def _own_names(
    values: Sequence[tuple[str, Any]], codes: Sequence[types.CodeType]
) -> Iterator[GuardOn]:
    """Yield guards on all names of objects that code lists, or asks for keys of `vars(...)`."""
    given = dict(values)
    found = {match[1] for source in given if (match := _OWN_NAMES.fullmatch(source))}
    holders = {holder: code for code in codes for holder in listed(code)}
    inside = {
        each for code in codes if "self" in listed(code) for each in (code, *_around(code, codes))
    }
    for source, value in values:
        if isinstance(value, (type, types.ModuleType, types.FunctionType, Tensor)):
            continue
        name = last_name(source).removeprefix(".")
        is_named = (name in holders or None in holders) and _takes_attributes(source, value)
        if hasattr(value, "__dict__") and (is_named or _runs(value, inside)):
            found.add(f"{source}.__dict__")
    yield from (GuardOn("KEYS", source) for source in sorted(found))


def _around(code: types.CodeType, codes: Sequence[types.CodeType]) -> Iterator[types.CodeType]:
    """Yield the functions that code is defined in."""
    return (each for each in codes if each is not code and code in nested(each))


def _runs(value: Any, codes: Collection[types.CodeType]) -> bool:
    """Return whether some code is of a method of an object's class."""
    if not codes or _OF_TORCH.match(type(value).__module__):
        return False
    return any(
        function.__code__ in codes
        for kind in type(value).__mro__
        for code in codes
        for function in functions_in(vars(kind).get(code.co_name))
    )


_OF_TORCH = re.compile(r"torch\b")


def _has_keys(source: str, value: Any) -> bool:
    """Return whether something is a dict whose keys code may miss: none of the process, none of torch's hooks."""
    if not isinstance(value, dict) or value is sys.modules or _OF_DYNAMO.match(source):
        return False
    if value is getattr(environment(), "_data", None):
        return False
    return not _HOOKS.fullmatch(last_name(source))


def last_name(source: str) -> str:
    """Return the name by which code reaches what is at a source, nothing where it has none.

    Names of attributes and keys begin with a dot.
    """
    root, last = _ROOT.fullmatch(source), _LAST.search(source)
    if root is not None:
        return root[1]
    return "" if last is None else f".{last[1] or last[2]}"


def _is_of_users(value: Any) -> bool:
    if is_known(type(value).__module__):
        return False
    return isinstance(value, nn.Module) or hasattr(value, "__dict__")


def is_known(module: str | None) -> bool:
    """Say whether a module comes with torch or Python, which nobody edits."""
    root = (module or "").partition(".")[0]
    return root == "torch" or root in sys.stdlib_module_names
