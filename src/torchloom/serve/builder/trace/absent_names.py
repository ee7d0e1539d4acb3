"""The attributes and keys that code looks for, found in its bytecode.

Dynamo guards what it finds, but not everything that it does not find: no missing attribute of a module, function or
class, and nothing whose absence raises an error that code catches. Each name here comes with the name of its holder
(`config` for `self.config.scale`), or with None where any object may hold it.
"""

from __future__ import annotations

import dis
import functools
import itertools
import re
import types
from collections.abc import Iterable, Mapping, Sequence

_CATCH = frozenset({"CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"})
_ATTRIBUTE = frozenset({"AttributeError", "Exception", "BaseException"})
_KEY = frozenset({"KeyError", "LookupError", "Exception", "BaseException"})
_NAMED = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_SILENT = frozenset({"PUSH_NULL", "CACHE", "NOP", "RESUME", "PRECALL", "COPY_FREE_VARS"})
_PLAIN = re.compile(r"LOAD_(?:FAST|GLOBAL|NAME|DEREF|CLOSURE)(?!_LOAD).*")
Name = tuple[str | None, str]
"""What holds something, None for anything, and what it is looked for by."""


@functools.cache
def _steps(code: types.CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname not in _SILENT]


@functools.cache
def asked_for(code: types.CodeType) -> frozenset[Name]:
    """Return the names that code hands to `hasattr` and `getattr`."""
    named, holders = _asked(code)
    return named | {(holder, text) for holder in holders for text in _texts(code.co_consts)}


def asks_by_any_name(code: types.CodeType) -> frozenset[str | None]:
    """Return what code asks with `hasattr` and `getattr` for names that it does not spell there."""
    return _asked(code)[1]


@functools.cache
def _asked(code: types.CodeType) -> tuple[frozenset[Name], frozenset[str | None]]:
    steps, named, holders = _steps(code), set[Name](), set[str | None]()
    for start, step in enumerate(steps):
        if step.argval not in ("hasattr", "getattr") or not step.opname.startswith("LOAD_"):
            continue
        end = _end_of(steps, start + 1)
        name, *rest = steps[end : end + 2] or [step]
        holder = _holder(code, steps[end - 1]) if end > start + 1 else None
        is_spelled = end > start + 1 and name.opname == "LOAD_CONST"
        if is_spelled and not any(each.opname.startswith("BINARY") for each in rest):
            if _is_name(name.argval):
                named.add((holder, name.argval))
        else:
            holders.add(holder)
    return frozenset(named), frozenset(holders)


def missed(codes: Iterable[types.CodeType], left: Iterable[types.CodeType] = ()) -> frozenset[Name]:
    """Return the attributes that code looks for where it catches that they are not there.

    Only that code itself, and what it calls and did not come back from: with all that it calls, a model of
    transformers would have 50 000 facts.

    Args:
        codes: what was traced.
        left: what was not, and may have been begun.
    """
    looked = [code for code in codes if _catches(code, _ATTRIBUTE)]
    waiting, called = list(left), set[str]()
    while more := {name for code in looked for name in code.co_names} - called:
        called |= more
        looked += [code for code in waiting if code.co_name in called]
        waiting = [code for code in waiting if code.co_name not in called]
    return frozenset[Name]().union(*map(_attributes_of, looked))


@functools.cache
def _attributes_of(code: types.CodeType) -> frozenset[Name]:
    steps = _steps(code)
    return frozenset(
        (_name_of(code, steps[at - 1]), step.argval)
        for at, step in enumerate(steps)
        if at and step.opname in _ATTRIBUTES and _is_name(step.argval)
    )


def misses_keys(code: types.CodeType) -> bool:
    """Return whether code catches that a key is not there."""
    return _catches(code, _KEY)


@functools.cache
def listed(code: types.CodeType) -> frozenset[str | None]:
    """Return what code asks for the names that it has of its own, by `vars(...)` or `.__dict__`."""
    steps, found = _steps(code), set[str | None]()
    for at, step in enumerate(steps):
        if step.argval == "__dict__" and step.opname in _ATTRIBUTES:
            found.add(_holder(code, steps[at - 1]))
        elif step.argval == "vars" and step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            end = _end_of(steps, at + 1)
            found.add(_holder(code, steps[end - 1]) if end > at + 1 else None)
    return frozenset(found)


def _end_of(steps: Sequence[dis.Instruction], start: int) -> int:
    """Return where loading a name and attributes of it ends; where it starts if it is none."""
    end = start
    if end < len(steps) and _PLAIN.fullmatch(steps[end].opname):
        end += 1
        while end < len(steps) and steps[end].opname in _ATTRIBUTES:
            end += 1
    return end


def texts_of(codes: Iterable[types.CodeType]) -> frozenset[str]:
    """Return the texts in code that could be names."""
    return frozenset(text for code in codes for text in _texts(code.co_consts))


def _texts(constants: Sequence[object]) -> set[str]:
    found = set[str]()
    for each in constants:
        if _is_name(each):
            found.add(str(each))
        elif isinstance(each, tuple):
            found |= _texts(each)
    return found


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _name_of(code: types.CodeType, step: dis.Instruction) -> str | None:
    """Return the name of what a step loads, where that is more than a name of the function's own."""
    if step.opname in _NAMED:
        return step.argval
    return _imported(code).get(step.argval) if step.opname.startswith("LOAD_FAST") else None


@functools.cache
def _imported(code: types.CodeType) -> Mapping[str, str]:
    """Return which names of a function's own are modules, or parts of them, that it imports."""
    found = dict[str, str]()
    for step, then in itertools.pairwise(_steps(code)):
        if step.opname.startswith("IMPORT_") and then.opname.startswith("STORE_FAST"):
            is_part = step.opname == "IMPORT_FROM"
            stored = then.argval if isinstance(then.argval, str) else then.argval[0]  # 3.13: a pair
            found[stored] = step.argval if is_part else step.argval.partition(".")[0]
    return found


def _holder(code: types.CodeType, step: dis.Instruction) -> str | None:
    """Return what a step loads; "self" for the object whose method the code is."""
    is_local = step.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
    return "self" if is_local and step.argval == "self" else _name_of(code, step)


@functools.cache
def _catches(code: types.CodeType, errors: frozenset[str]) -> bool:
    if "suppress" in code.co_names:
        return True
    steps = {each.opname for each in dis.get_instructions(code)}
    if steps.isdisjoint(_CATCH):
        return False
    return not errors.isdisjoint(code.co_names)
