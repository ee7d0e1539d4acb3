"""The values on the symbolic stack: the text of an expression, and when it has to be evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torchloom.inspect.pseudo.literals import constant_text


@dataclass(frozen=True)
class Expression:
    """An expression that has been evaluated but not yet used."""

    text: str
    is_atom: bool = True
    """Whether it can stand beside an operator without parentheses."""
    is_fragile: bool = False
    """Whether a later statement could change its value, or it has effects, as loads and calls have."""
    reads: frozenset[str] = frozenset()
    """Variables in it."""

    def __str__(self) -> str:
        return self.text

    @property
    def operand(self) -> str:
        """The text as a part of a larger expression."""
        return self.text if self.is_atom else f"({self.text})"

    @property
    def owner(self) -> str:
        """The text in front of a dot."""
        return self.operand

    @property
    def key(self) -> str:
        """The text as a subscript."""
        return self.text

    @property
    def items(self) -> tuple[Part, ...] | None:
        """The elements of a tuple, None for anything else."""
        return None


@dataclass(frozen=True)
class Constant(Expression):
    """A constant of the code."""

    value: Any = None

    @property
    def owner(self) -> str:
        """A number needs parentheses: `5.real` is no Python."""
        return f"({self.text})" if self.text[:1].isdigit() else self.operand

    @property
    def items(self) -> tuple[Part, ...] | None:
        """The elements of a tuple or a frozenset."""
        if type(self.value) is tuple:
            return tuple(constant(each) for each in self.value)
        if type(self.value) is frozenset:
            return tuple(sorted((constant(each) for each in self.value), key=str))
        return None

    @property
    def key(self) -> str:
        """A tuple that holds slices is written without parentheses."""
        if type(self.value) is slice:
            return _slice_key(self.value.start, self.value.stop, self.value.step)
        return _tuple_key(self.items, self.text) if type(self.value) is tuple else self.text


def constant(value: Any) -> Constant:
    """Return a constant for the stack; what begins with a sign needs parentheses beside operators."""
    text = constant_text(value)
    return Constant(text, is_atom=not text.startswith("-"), value=value)


@dataclass(frozen=True)
class NameExpression(Expression):
    """A variable: it may be written twice."""


@dataclass(frozen=True)
class Tuple(Expression):
    """A tuple whose elements are known."""

    parts: tuple[Part, ...] = ()

    @property
    def items(self) -> tuple[Part, ...] | None:
        """The elements."""
        return self.parts

    @property
    def key(self) -> str:
        """A tuple that holds slices is written without parentheses."""
        return _tuple_key(self.parts, self.text)


@dataclass(frozen=True)
class Slice(Expression):
    """A slice: `1:2` is written in a subscript alone, `slice(1, 2)` elsewhere."""

    bounds: tuple[Part, ...] = ()

    @property
    def key(self) -> str:
        """The text as a subscript."""
        return ":".join("" if _is_none(each) else each.text for each in self.bounds)


@dataclass(frozen=True)
class Iterating(Expression):
    """A new iterator: a loop prints the iterable instead."""

    iterable: str = ""


@dataclass(frozen=True)
class Formatted(Expression):
    """An f-string."""

    inside: str = ""
    """The text between its quotes."""
    depth: int = 0
    """Nesting depth of formats in formats."""


@dataclass(frozen=True)
class Converted(Expression):
    """What `!r` makes of a value (3.13 and later), before it is formatted."""

    of: str = ""
    conversion: str = ""


@dataclass(frozen=True)
class Cell(Expression):
    """The cell of a variable, as closures hold it, not the value in it."""

    variable: str = ""


@dataclass(frozen=True)
class SavedVariable(Expression):
    """A variable of the function while a comprehension uses its name (3.12 and later)."""

    was_cell: bool = False


@dataclass(frozen=True)
class Made(Expression):
    """A function to which parts are still added (3.13 and later)."""

    code: CodeType | None = None
    parts: tuple[tuple[int, Part], ...] = ()
    """Defaults, annotations and closure, each with the flag of its kind."""


@dataclass(frozen=True)
class ClassBody(Expression):
    """The body of a class that is about to be made."""

    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spread(Expression):
    """A part of a display or of a call that adds several elements: `*x`, `**x`."""


@dataclass(frozen=True)
class Pair(Expression):
    """An element of a dict."""

    of: tuple[Part, ...] = ()
    """Key and value."""


def reads_of(parts: Iterable[Part]) -> frozenset[str]:
    """Return the variables in any of the parts."""
    return frozenset[str]().union(*(part.reads for part in parts))


class Display:
    """A list, set or dict on the stack whose changes can be tracked.

    Several places of the stack may hold the same one. When one of them is used in a way that cannot be tracked,
    the display gets a name, which is its text everywhere from then on.
    """

    def __init__(self, kind: str, elements: list[Part]) -> None:
        self.kind = kind
        """ "list", "set" or "dict"."""
        self.elements = elements
        self.name: str | None = None

    @property
    def text(self) -> str:
        """The display as written, or its name."""
        if self.name is not None:
            return self.name
        inside = ", ".join(part.text for part in self.elements)
        if self.kind == "list":
            return f"[{inside}]"
        return f"{{{inside}}}" if inside or self.kind == "dict" else "set()"

    operand = owner = key = text
    is_atom = True

    @property
    def is_fragile(self) -> bool:
        """Whether part of it has to be named before a statement with effects."""
        return self.name is None and any(part.is_fragile for part in self.elements)

    @property
    def reads(self) -> frozenset[str]:
        """Variables in it."""
        return frozenset({self.name}) if self.name is not None else reads_of(self.elements)

    @property
    def items(self) -> tuple[Part, ...] | None:
        """The elements of a list, while they are known."""
        return tuple(self.elements) if self.name is None and self.kind == "list" else None

    @property
    def has_spread(self) -> bool:
        """Whether a part stands for several elements."""
        return any(isinstance(part, Spread) for part in self.elements)

    @property
    def is_open(self) -> bool:
        """Whether this is a list whose elements are known one by one."""
        return self.kind == "list" and self.name is None and not self.has_spread

    def within(self) -> Iterator[Display]:
        """Yield this display and those in it."""
        yield self
        for part in self.elements:
            if isinstance(part, Display):
                yield from part.within()

    def __str__(self) -> str:
        return self.text


Part = Expression | Display
"""Anything on the stack."""


def _is_none(part: Part) -> bool:
    return isinstance(part, Constant) and part.value is None


def _tuple_key(items: tuple[Part, ...] | None, text: str) -> str:
    slices = [isinstance(each, Slice) or each.text != each.key for each in items or ()]
    if not any(slices):
        return text
    return ", ".join(each.key for each in items or ()) + ("," if len(slices) == 1 else "")


def _slice_key(start: Any, stop: Any, step: Any) -> str:
    bounds = [start, stop] if step is None else [start, stop, step]
    return ":".join("" if each is None else constant_text(each) for each in bounds)
