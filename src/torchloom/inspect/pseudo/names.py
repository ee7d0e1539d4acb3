"""Names: those that a function uses, fresh ones, and those that contain addresses."""

from __future__ import annotations

import builtins
import dis
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType

from torchloom.inspect.pseudo.expressions import name, shared_name
from torchloom.inspect.pseudo.values import NameExpression

_ADDRESS = re.compile(r"(?<![^\W_])\d{12,}(?![^\W_])")
_GRAPH_ID = re.compile(r"(__compiled_fn_\d+)_[0-9a-f]{8}_[0-9a-f_]{27}")
_WRITES_GLOBAL = ("STORE_GLOBAL", "DELETE_GLOBAL")


@dataclass
class Scope:
    """The names of one function that is printed."""

    code: CodeType
    used: set[str]
    """Names in use here or in an enclosing or nested function."""
    around: frozenset[str] = frozenset()
    """Variables of the enclosing functions."""
    is_class: bool = False
    """Whether it is the body of a class."""
    has_yield: bool = False
    cells: frozenset[str] = field(init=False)
    """Variables that it shares with nested or enclosing functions."""
    variables: frozenset[str] = field(init=False)
    written_globals: tuple[str, ...] = field(init=False)
    """Globals that it stores or deletes."""
    changing: frozenset[str] = field(init=False)
    """Globals that it or a function within stores or deletes."""

    def __post_init__(self) -> None:
        code = self.code
        self.cells = frozenset((*code.co_cellvars, *code.co_freevars))
        self.variables = self.cells | frozenset(code.co_varnames)
        self.written_globals = _written_globals(code)
        self.changing = frozenset(name for each in _all(code) for name in _written_globals(each))

    def fresh(self, stem: str = "t") -> str:
        """Return a name that is not used yet."""
        number = 1
        while f"{stem}{number}" in self.used:
            number += 1
        self.used.add(f"{stem}{number}")
        return f"{stem}{number}"

    def fresh_like(self, title: str) -> str:
        """Return a name for a function: its own if that is free."""
        stem = re.sub(r"\W", "", title) or "function"
        if stem.isidentifier() and stem == title and stem not in self.used:
            self.used.add(stem)
            return stem
        return self.fresh(f"{stem}_")

    def global_(self, title: str) -> NameExpression | None:
        """Return a global as a value; None where its name cannot be written: a variable hides it."""
        shown = _GRAPH_ID.sub(r"\1", title)
        if title in self.variables or not title.isidentifier():
            return None
        if title in self.changing or not hasattr(builtins, title):
            return shared_name(shown)
        return name(shown)

    def declared_globals(self) -> list[str]:
        """Return the globals that need a declaration: stored here, or hidden by a function around."""
        found = dict.fromkeys(self.written_globals)
        for ins in dis.get_instructions(self.code):
            if ins.opname == "LOAD_GLOBAL" and ins.argval in self.around:
                found[str(ins.argval)] = None
        return [each for each in found if each not in self.variables]

    def declared_nonlocals(self) -> list[str]:
        """Return the variables of functions around it that it stores or deletes."""
        writes = ("STORE_DEREF", "DELETE_DEREF")
        found = {
            str(ins.argval): None
            for ins in dis.get_instructions(self.code)
            if ins.opname in writes and ins.argval in self.code.co_freevars
        }
        return list(found)


def names_in(code: CodeType) -> set[str]:
    """Return every name in a code object and those nested in it."""
    return {
        name
        for each in _all(code)
        for name in (*each.co_names, *each.co_varnames, *each.co_cellvars, *each.co_freevars)
    }


def without_ids(names: Sequence[str]) -> tuple[str, ...]:
    """Return names without the addresses that Dynamo puts into some; different ones stay different.

    Example:
        >>> without_ids(["___module_deque_140586701475392_c1", "x"])
        ('___module_deque_id_c1', 'x')
    """
    taken = {each for each in names if not _has_address(each)}
    shown: list[str] = []
    for each in names:
        new, number = each, 1
        while _has_address(new) or (new != each and new in taken):
            new = _ADDRESS.sub("id" if number == 1 else f"id{number}", each)
            number += 1
        taken.add(new)
        shown.append(new)
    return tuple(shown)


def _has_address(name: str) -> bool:
    return _ADDRESS.search(_GRAPH_ID.sub("", name)) is not None


def _all(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if type(each) is CodeType:
            yield from _all(each)


def _written_globals(code: CodeType) -> tuple[str, ...]:
    found = {
        str(ins.argval): None
        for ins in dis.get_instructions(code)
        if ins.opname in _WRITES_GLOBAL and isinstance(ins.argval, str)
    }
    return tuple(found)
