"""Guards on what a trace relies on and Dynamo puts no guard on.

Such things rarely change while a process lives, so Dynamo leaves them out. A stored program meets files that were
edited in between, so here they become guards, and then facts like all others.
"""

from __future__ import annotations

import collections
import decimal
import functools
import re
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from torchloom._torch.facts import guards_class_methods
from torchloom._torch.full_capture import GuardOn
from torchloom.pieces.places import TEXT_HASHES
from torchloom.serve.builder.trace.absent_guards import (
    absence_guards,
    is_known,
    last_name,
    missing_key_guards,
)
from torchloom.serve.builder.trace.class_checks import class_check_guards
from torchloom.serve.builder.trace.environment_reads import environ_guards
from torchloom.serve.builder.trace.set_order import (
    asks_for_addresses,
    asks_for_hashes,
    depends_on_order,
)
from torchloom.serve.model.functions import has_version

_METHODS = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
)
_TO_WEIGHTS = re.compile(r"\._(?:parameters|buffers)\['\w+'\]$")


def unguarded(
    values: Iterable[tuple[str, Any]], codes: Sequence[types.CodeType]
) -> Iterator[GuardOn]:
    """Yield guards on what code may notice and Dynamo does not guard.

    Args:
        values: what the trace read, by its expressions.
        codes: the functions that were traced, without torch's.
    """
    values, codes = list(values), list(dict.fromkeys(codes))
    users = [code for code in codes if not has_version(code)]
    yield from _builtin_methods(values)
    yield from _orders(values, users)
    yield from environ_guards(values, users)
    yield from class_check_guards(values, users)
    yield from absence_guards(values, codes, users)
    if not guards_class_methods():
        yield from _class_values(values, users)
    yield from missing_key_guards(values, codes)
    yield from _memory(values)


def _builtin_methods(values: Iterable[tuple[str, Any]]) -> Iterator[GuardOn]:
    """Yield guards on methods of builtin classes, and on numbers and lengths that are no plain ones."""
    for source, value in values:
        for step, each in _parts(value):
            if isinstance(each, _METHODS):
                yield GuardOn("EQUALS_MATCH", f"{source}{step}")
        if isinstance(value, decimal.Decimal):
            yield GuardOn("EQUALS_MATCH", source)
        if isinstance(value, collections.deque):
            yield GuardOn("EQUALS_MATCH", f"{source}.maxlen")


def _class_values(
    values: Iterable[tuple[str, Any]], users: Collection[types.CodeType]
) -> Iterator[GuardOn]:
    """Yield guards on all that classes hold whose class methods were traced: whatever these hand on has no guard."""
    for source, value in values:
        kind = value if isinstance(value, type) else type(value)
        held = {
            name: each
            for base in reversed(kind.__mro__)
            if not is_known(base.__module__)
            for name, each in vars(base).items()
        }
        methods = [each.__func__ for each in held.values() if isinstance(each, classmethod)]
        if not any(getattr(each, "__code__", None) in users for each in methods):
            continue
        for name, each in sorted(held.items()):
            is_code = callable(each) or hasattr(each, "__get__")
            if not is_code and not re.fullmatch(r"__\w+__", name):
                yield GuardOn("EQUALS_MATCH", f"{source}.{name}")


def _memory(values: Iterable[tuple[str, Any]]) -> Iterator[GuardOn]:
    """Yield guards on tensors that are no weights, which may be or share memory with others; weights come first."""
    tensors = {source: value for source, value in values if isinstance(value, Tensor)}
    weights = [source for source in tensors if _TO_WEIGHTS.search(source)]
    others = [source for source in tensors if source not in weights]
    if not others:
        return
    yield from (GuardOn("MEMORY", source) for source in weights)
    for source in others:
        yield GuardOn("MEMORY", source, "other")


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
            name = last_name(source)
            if not name or any(depends_on_order(code, (name,)) for code in codes):
                yield GuardOn("ORDER", source)


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
