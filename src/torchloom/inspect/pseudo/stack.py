"""The symbolic stack: holds expressions, and names them before a statement could change their value.

Python evaluates the parts of one expression in the order in which they were pushed, so a part needs no name until
a statement is emitted. Before that, every expression on the stack that is not plain is assigned to a name.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from torchloom.inspect.pseudo.expressions import HOOK, clone_stack, is_plain, name
from torchloom.inspect.pseudo.names import Scope
from torchloom.inspect.pseudo.values import Constant, Display, Expression, NameExpression, Part

_MAX_TEXT = 4000
UNKNOWN = Expression("<?>")
"""What a pop from an empty stack returns."""
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME")
_STORES_FIRST = ("STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST")


@dataclass
class Stack:
    """The state of a symbolic run: the stack, and where lines go."""

    stack: list[Part]
    emit: Callable[[str], None]
    scope: Scope
    nested: Callable[..., tuple[list[str], list[str]]]
    """Returns the parameters and the lines of a nested function; see the printer."""
    consts: tuple[Any, ...] = ()
    instructions: Sequence[dis.Instruction] = ()
    at: int = 0
    """Index of the instruction that runs."""
    kw_names: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    """New names of variables that have another name here."""
    celled: frozenset[str] = frozenset()
    """Variables that are cells at this point: from Python 3.13 on, one instruction loads cells and values."""
    in_loop: bool = False
    hooks: frozenset[str] = frozenset()
    """Locals that hold Dynamo's own bookkeeping."""
    kept: frozenset[str] = frozenset()
    """Those among them that never hold anything else; see `bookkeeping`."""

    def fork(self, emit: Callable[[str], None], *, in_loop: bool = False) -> Any:
        """Return a machine with a stack of its own, for one of two branches or the body of a loop."""
        stack, in_loop = clone_stack(self.stack), in_loop or self.in_loop
        return replace(self, stack=stack, emit=emit, in_loop=in_loop)

    # -- taking and putting

    def pop_raw(self) -> Part:
        """Pop the top; an empty stack returns a placeholder."""
        return self.stack.pop() if self.stack else UNKNOWN

    def pop(self) -> Part:
        """Pop the top for a use that is not tracked: a list that the stack also holds elsewhere gets a name."""
        return self.pinned(self.pop_raw())

    def pop_many(self, count: int) -> list[Part]:
        """Pop several values, the deepest first."""
        return [self.pop() for _ in range(count)][::-1]

    def push(self, value: Part) -> None:
        """Push a value; one with a text of more than 4000 characters gets a name."""
        if isinstance(value, Expression) and len(value.text) > _MAX_TEXT:
            value = self.named(value)
        self.stack.append(value)

    # -- names for what waits

    def pinned(self, value: Part) -> Part:
        """Name every display in `value` that is held elsewhere as well, so that it stays one object."""
        if not isinstance(value, Display) or value.name is not None:
            return value
        for inner in [each for each in value.within() if each is not value]:
            if inner.name is None and (self._is_held(inner) or _count(value, inner) > 1):
                self._pin(inner, value)
        if self._is_held(value):
            self._pin(value, value)
        return value

    def _pin(self, display: Display, whole: Display) -> None:
        self.settle()
        if whole.kind == "list" and not whole.has_spread:
            self._settle(whole.elements, None)
        if display.name is None:
            display.name = self._write(display)

    def _is_held(self, wanted: Display) -> bool:
        held = (part for part in self.stack if isinstance(part, Display))
        return any(each is wanted for part in held for each in part.within())

    def _write(self, value: Part) -> str:
        fresh = self.scope.fresh()
        self.emit(f"{fresh} = {value.text}")
        return fresh

    def named(self, value: Part) -> Part:
        """Emit an assignment of `value`, the latest one, to a fresh name and return that name."""
        self.settle()
        return self._named(self.pinned(value))

    def _named(self, value: Part) -> Part:
        if not isinstance(value, Display):
            return name(self._write(value))
        if value.name is None:
            value.name = self._write(value)
        return value

    def settle(self, only: str | None = None, upto: int | None = None) -> None:
        """Name waiting values that the next statement could change.

        Args:
            only: a variable that is about to be rebound; None for a statement with any effect.
            upto: how many of the stack, from the bottom, are meant; None for all.
        """
        if any(part.is_fragile and only in part.reads for part in self.stack[:upto]):
            only = None  # what is evaluated now comes after all that waits below it
        self._settle(self.stack, only, upto)

    def _settle(self, parts: list[Part], only: str | None, upto: int | None = None) -> None:
        for index, value in enumerate(parts[:upto]):
            if value is HOOK:
                continue
            concerned = value.is_fragile if only is None else only in value.reads
            if not concerned:
                continue
            if isinstance(value, Display) and value.kind == "list" and not value.has_spread:
                if value.name is None:
                    self._settle(value.elements, only)
            elif not isinstance(value, Display) or value.name is None:
                parts[index] = self._named(value)

    def once(self, depth: int) -> Part:
        """Return the value at `depth`, 1 for the top, in a form that may be written twice."""
        index = len(self.stack) - depth
        value = self.stack[index]
        if isinstance(value, Display) or is_plain(value):
            return value
        self.settle(upto=index + 1)
        value = self.stack[index]
        if not is_plain(value):
            value = self.stack[index] = self._named(value)
        return value

    def enter_loop(self, stored: frozenset[str]) -> None:
        """Name all values that a loop may change: those that it stores, and displays, which it may extend.

        Args:
            stored: the variables that the loop stores.
        """
        self.settle()
        for index, value in enumerate(self.stack):
            if isinstance(value, Display) or (stored & value.reads and value is not HOOK):
                self.stack[index] = self._named(self.pinned(value))

    def statement(self, text: str) -> None:
        """Emit a statement with effects, after naming the values that it could change."""
        self.settle()
        self.emit(text)

    def rebinding(self, target: str, *, has_effects: bool) -> None:
        """Name values that read a variable that is about to be rebound; with effects, all other values too."""
        if has_effects:
            self.settle()
        self.settle(only=target)

    def assign(self, target: str, value: Part, *, is_shared: bool) -> None:
        """Emit `target = value`.

        Args:
            target: a variable.
            value: what it gets.
            is_shared: whether other functions read the variable.
        """
        self.rebinding(target, has_effects=value.is_fragile or is_shared)
        if value.text != target:
            self.emit(f"{target} = {value.text}")

    # -- names of variables

    def variable(self, title: str) -> NameExpression:
        """Return a variable of this function as a value."""
        shown = self.renamed.get(title, title)
        reads = frozenset({shown})
        return NameExpression(shown, is_fragile=self.is_shared(title), reads=reads)

    def is_shared(self, title: str) -> bool:
        """Return whether other functions may change a variable."""
        return title in self.scope.cells or self.scope.is_class

    def stored_next(self) -> str | None:
        """Return the variable that the next instruction stores, if it does."""
        for ins in self.instructions[self.at + 1 : self.at + 2]:
            if ins.opname in _STORES:
                return self.renamed.get(str(ins.argval), str(ins.argval))
            if ins.opname in _STORES_FIRST:
                return self.renamed.get(pair_of_names(ins)[0], pair_of_names(ins)[0])
        return None


def pair_of_names(ins: dis.Instruction) -> tuple[str, str]:
    """Return the two variables of an instruction that stands for two (3.13 and later)."""
    if isinstance(ins.argval, tuple):
        first, second = ins.argval
        return str(first), str(second)
    first, _, second = ins.argrepr.partition(",")
    return first.strip(), second.strip()


def code_of(part: Part) -> CodeType | None:
    """Return the code object that a constant is, None for anything else."""
    value = part.value if isinstance(part, Constant) else None
    return value if isinstance(value, CodeType) else None


def _count(whole: Display, wanted: Display) -> int:
    return sum(each is wanted for each in whole.within())
