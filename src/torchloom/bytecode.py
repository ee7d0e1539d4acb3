"""A hash of what a code object does. Names of files and numbers of lines do not enter it."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterator
from typing import Any

_KNOWN: dict[types.CodeType, str] = {}


def code_digest(code: types.CodeType) -> str:
    """Return a hash of what a code object does, the functions inside it included."""
    known = _KNOWN.get(code)
    if known is None:
        parts = (
            *(code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars),
            *(code.co_cellvars, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
            *(code.co_flags, [_constant(each) for each in code.co_consts]),
            getattr(code, "co_exceptiontable", b""),
        )
        known = hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
        _KNOWN[code] = known
    return known


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and all that is defined inside of it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from nested(each)


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return f"{type(value).__name__} {value!r}"
