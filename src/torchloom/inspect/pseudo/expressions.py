"""Makes what goes on the symbolic stack: names, operators, calls, tuples, slices."""

from __future__ import annotations

from collections.abc import Iterable

from torchloom.inspect.pseudo.values import (
    Cell,
    Constant,
    Display,
    Expression,
    NameExpression,
    Pair,
    Part,
    SavedVariable,
    Slice,
    Spread,
    Tuple,
    reads_of,
)

NULL = Expression("NULL")
"""What calls push where a bound method has no `self`."""
HOOK = Expression("<profiler hook>")
"""What Dynamo's own bookkeeping around a graph works with: not shown."""
BUILD_CLASS = Expression("__build_class__")
"""What makes a class."""
_MARKS = (NULL, HOOK, BUILD_CLASS)


def name(text: str) -> NameExpression:
    """Return a variable that only this function changes."""
    return NameExpression(text, reads=frozenset({text}))


def shared_name(text: str) -> NameExpression:
    """Return a variable that a call may change: a global, or one that nested functions share."""
    return NameExpression(text, is_fragile=True, reads=frozenset({text}))


def compound(text: str, *parts: Part) -> Expression:
    """Return an expression with operators, made of parts."""
    return Expression(text, is_atom=False, is_fragile=True, reads=reads_of(parts))


def primary(text: str, *parts: Part) -> Expression:
    """Return a load or a call, which needs no parentheses."""
    return Expression(text, is_fragile=True, reads=reads_of(parts))


def tuple_of(parts: Iterable[Part]) -> Tuple:
    """Return a tuple of parts."""
    items = tuple(parts)
    inside = ", ".join(part.text for part in items) + ("," if len(items) == 1 else "")
    is_fragile = any(part.is_fragile for part in items)
    return Tuple(f"({inside})", is_fragile=is_fragile, reads=reads_of(items), parts=items)


def slice_of(bounds: Iterable[Part]) -> Slice:
    """Return a slice of two or three bounds."""
    parts = tuple(bounds)
    text = f"slice({', '.join(part.text for part in parts)})"
    is_fragile = any(part.is_fragile for part in parts)
    return Slice(text, is_fragile=is_fragile, reads=reads_of(parts), bounds=parts)


def spread(star: str, value: Part) -> Spread:
    """Return `*value` or `**value`."""
    return Spread(f"{star}{value.operand}", is_fragile=True, reads=value.reads)


def pair_of(key: Part, value: Part) -> Pair:
    """Return an element of a dict."""
    is_fragile = key.is_fragile or value.is_fragile
    reads = reads_of((key, value))
    return Pair(f"{key.text}: {value.text}", False, is_fragile, reads, of=(key, value))


def is_plain(part: Part) -> bool:
    """Say whether a value may be written twice and mean the same object: constants, local names."""
    if isinstance(part, NameExpression):
        return not part.is_fragile
    if isinstance(part, Tuple) and not part.parts:
        return True
    return isinstance(part, (Constant, Cell, SavedVariable)) or any(part is each for each in _MARKS)


def clone_stack(stack: list[Part]) -> list[Part]:
    """Copy a stack for another branch: displays become its own, shared as they were."""
    memo: dict[int, Display] = {}

    def clone(part: Part) -> Part:
        if not isinstance(part, Display):
            return part
        if id(part) not in memo:
            memo[id(part)] = twin = Display(part.kind, [])
            twin.name = part.name
            twin.elements = [clone(each) for each in part.elements]
        return memo[id(part)]

    return [clone(part) for part in stack]
