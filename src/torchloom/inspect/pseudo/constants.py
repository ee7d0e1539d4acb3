"""Hides values in the constants of bytecode: shows literals of the source, never objects of the program.

Dynamo puts values into the code that it writes: the globals of a nested function, objects and strings
that were read while tracing. Printing them would copy secrets and tensors into a record, and run the
`__repr__` of a user's class.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from types import CodeType
from typing import Any

_ADDRESS = re.compile(r"(?<![^\W_])\d{12,}(?![^\W_])")
_GRAPH_ID = re.compile(r"(__compiled_fn_\d+)_[0-9a-f]{8}_[0-9a-f_]{27}")
_NUMBERS = (bool, type(None), type(...), float, complex)
_MAX_BITS = 256
"""Longer integers are hidden: Python refuses to print integers of some thousand digits."""
_MAX_CHARS = 200
_PLAIN_TORCH = ("dtype", "device", "layout", "memory_format")
_type_name = type.__dict__["__name__"].__get__


class Hidden:
    """Stands for a constant whose value is not shown."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def without_values(code: CodeType, original: CodeType | None = None) -> CodeType:
    """Return a copy of a code object in which only literals are left of its constants.

    Names lose the addresses that Dynamo puts into some.

    Args:
        code: any bytecode.
        original: the code of the source, whose strings are shown; default: those of `code`.
    """
    source = code if original is None else original
    known = frozenset(_texts(source.co_consts)) | {*code.co_names, *code.co_varnames}
    return code.replace(
        co_consts=tuple(_shown(each, known) for each in code.co_consts),
        co_names=without_ids(code.co_names),
    )


def _shown(value: Any, known: Collection[str | bytes]) -> Any:  # noqa: PLR0911
    """Return a literal as it is, anything else as its type."""
    kind = type(value)
    # Types are compared by identity alone: a metaclass of the program may define `==`.
    if any(kind is each for each in (CodeType, *_NUMBERS, *_plain_torch())):
        return value
    if kind is int:
        return value if value.bit_length() <= _MAX_BITS else Hidden("<int>")
    if kind is str or kind is bytes:
        if value not in known:
            return Hidden(f"<{kind.__name__}>")
        return value if len(value) <= _MAX_CHARS else Hidden(f"{value[:_MAX_CHARS]!r}...")
    if kind is tuple or kind is frozenset:
        return kind(_shown(each, known) for each in value)
    if kind is slice:
        parts = (_shown(each, known) for each in (value.start, value.stop, value.step))
        return slice(*parts)
    return Hidden(f"<{_type_name(kind)}>")


def _plain_torch() -> list[type]:
    """Return torch's types whose values are words such as `torch.float32`, if torch is loaded."""
    torch = sys.modules.get("torch")
    return [] if torch is None else [getattr(torch, name) for name in _PLAIN_TORCH]


def _texts(consts: tuple[Any, ...] | frozenset[Any]) -> Iterator[str | bytes]:
    """Yield the strings among constants, those of nested functions included."""
    for each in consts:
        kind = type(each)
        if kind is str or kind is bytes:
            yield each
        elif kind is tuple or kind is frozenset:
            yield from _texts(each)
        elif kind is CodeType:
            yield from _texts(each.co_consts)


def without_ids(names: Sequence[str]) -> tuple[str, ...]:
    """Return names without the addresses and the ids of graphs that Dynamo puts into some.

    Example:
        >>> without_ids(["___module_deque_140586701475392_c1", "x"])
        ('___module_deque_id1_c1', 'x')
    """
    seen: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return seen.setdefault(match[0], f"id{len(seen) + 1}")

    return tuple(_ADDRESS.sub(number, _GRAPH_ID.sub(r"\1", name)) for name in names)
