"""What the symbolic stack holds: the text of an expression, and how careful one must be with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Value:
    """An expression that has been evaluated but not yet used."""

    text: str
    is_atom: bool = True
    """Whether it can stand beside an operator without parentheses."""
    is_fragile: bool = False
    """Whether a later call or store could change what it means: loads, calls."""
    reads: frozenset[str] = frozenset()
    """Local names in it."""
    items: tuple[Part, ...] | None = field(default=None, compare=False)
    """The elements of a list or dict that is still being built."""

    def __str__(self) -> str:
        return self.text

    @property
    def operand(self) -> str:
        """The text as a part of a larger expression."""
        return self.text if self.is_atom else f"({self.text})"


NULL = Value("NULL")
"""What calls push where a bound method has no `self`."""


def name(text: str) -> Value:
    """Return a local variable."""
    return Value(text, reads=frozenset({text}))


def compound(text: str, *parts: Part, fragile: bool = False) -> Value:
    """Return an expression with operators, made of parts."""
    return Value(
        text,
        is_atom=False,
        is_fragile=fragile or any(part.is_fragile for part in parts),
        reads=frozenset().union(*(part.reads for part in parts)),
    )


def primary(text: str, *parts: Part, fragile: bool = True) -> Value:
    """Return a load or a display, which needs no parentheses."""
    return Value(
        text,
        is_fragile=fragile or any(part.is_fragile for part in parts),
        reads=frozenset().union(*(part.reads for part in parts)),
    )


HOOK = Value("<profiler hook>")
"""What Dynamo's own bookkeeping around a graph works with: not shown."""


class ListDisplay:
    """A list that is still on the stack: what is done to it there can be followed.

    Several places of the stack may hold the same list. When one of them is used in a way that cannot
    be followed, the list gets a name, which from then on is its text everywhere.
    """

    def __init__(self, elements: list[Part]) -> None:
        self.elements = elements
        self.name: str | None = None

    @property
    def text(self) -> str:
        """The list as written, or its name."""
        return self.name or f"[{', '.join(part.text for part in self.elements)}]"

    operand = text
    is_atom = True

    @property
    def is_fragile(self) -> bool:
        """Whether something in it has to be settled before a statement with effects."""
        return self.name is None and any(part.is_fragile for part in self.elements)

    @property
    def reads(self) -> frozenset[str]:
        """Local names in it."""
        if self.name is not None:
            return frozenset({self.name})
        return frozenset[str]().union(*(part.reads for part in self.elements))

    @property
    def items(self) -> tuple[Part, ...] | None:
        """Its elements, while they are known."""
        return None if self.name is not None else tuple(self.elements)

    @property
    def is_open(self) -> bool:
        """Whether its elements are known one by one."""
        return self.name is None and not any(part.text.startswith("*") for part in self.elements)

    def within(self) -> Iterator[ListDisplay]:
        """Yield this list and the lists in it."""
        yield self
        for part in self.elements:
            if isinstance(part, ListDisplay):
                yield from part.within()

    def __str__(self) -> str:
        return self.text


Part = Value | ListDisplay
"""Anything on the stack."""


def clone_stack(stack: list[Part]) -> list[Part]:
    """Copy a stack for another branch: lists become lists of its own, shared as they were."""
    memo: dict[int, ListDisplay] = {}

    def clone(part: Part) -> Part:
        if not isinstance(part, ListDisplay):
            return part
        if id(part) not in memo:
            memo[id(part)] = twin = ListDisplay([])
            twin.name = part.name
            twin.elements = [clone(each) for each in part.elements]
        return memo[id(part)]

    return [clone(part) for part in stack]
