"""Loads and stores of variables, attributes and modules, and instructions that reorder the stack."""

from __future__ import annotations

import dis
import sys

from torchloom.inspect.pseudo.expressions import BUILD_CLASS, HOOK, NULL, name, primary, shared_name
from torchloom.inspect.pseudo.stack import UNKNOWN, Stack, pair_of_names
from torchloom.inspect.pseudo.values import (
    Cell,
    Display,
    NameExpression,
    Part,
    SavedVariable,
    constant,
)

HOOKS = ("record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit")
_SPECIAL = ("__enter__", "__exit__", "__aenter__", "__aexit__")


class Loads(Stack):
    """Instructions that load, store, delete and shuffle."""

    def op_LOAD_CONST(self, ins: dis.Instruction) -> None:
        self.push(constant(ins.argval))

    def op_LOAD_SMALL_INT(self, ins: dis.Instruction) -> None:
        self.push(constant(ins.argval if isinstance(ins.argval, int) else ins.arg))

    def op_LOAD_COMMON_CONSTANT(self, ins: dis.Instruction) -> None:
        self.push(name(ins.argrepr or str(ins.arg)))

    # -- variables

    def op_LOAD_FAST(self, ins: dis.Instruction) -> None:
        self._load(str(ins.argval))

    def _load(self, title: str) -> None:
        if title in self.hooks:
            self.push(HOOK)
        elif title in self.celled and sys.version_info >= (3, 13):
            self._push_cell(title)  # what `LOAD_CLOSURE` was
        else:
            self.push(self.variable(title))

    def op_LOAD_FAST_LOAD_FAST(self, ins: dis.Instruction) -> None:
        for each in pair_of_names(ins):
            self._load(each)

    def op_LOAD_DEREF(self, ins: dis.Instruction) -> None:
        title = str(ins.argval)
        self.push(HOOK if title in self.hooks else self.variable(title))

    def op_LOAD_CLOSURE(self, ins: dis.Instruction) -> None:
        self._push_cell(str(ins.argval))

    def _push_cell(self, title: str) -> None:
        shown = self.renamed.get(title, title)
        # The variable may not have a value yet: a function that uses it has its cell all the same.
        self.push(Cell(f"(lambda: {shown}).__closure__[0]", variable=shown))

    def op_LOAD_FROM_DICT_OR_DEREF(self, ins: dis.Instruction) -> None:
        self.pop()
        self.op_LOAD_DEREF(ins)

    def op_LOAD_FROM_DICT_OR_GLOBALS(self, ins: dis.Instruction) -> None:
        self.pop()
        self.op_LOAD_NAME(ins)

    def op_LOAD_LOCALS(self, ins: dis.Instruction) -> None:
        self.push(primary("locals()"))

    def op_LOAD_FAST_AND_CLEAR(self, ins: dis.Instruction) -> None:
        """Begin a comprehension: its variable hides one of the same name until that is restored."""
        title = str(ins.argval)
        self.renamed = {**self.renamed, title: self.scope.fresh(f"{title}_")}
        self.push(SavedVariable(title, was_cell=title in self.celled))
        self.celled -= {title}

    def op_MAKE_CELL(self, ins: dis.Instruction) -> None:
        title = str(ins.argval)
        self.celled |= {title}
        shown = self.renamed.get(title)
        if (
            shown is not None and self.in_loop
        ):  # it is made anew each time, and there is but one here
            self.emit(f"# `{shown}` is another variable each time the comprehension begins")

    def op_STORE_FAST(self, ins: dis.Instruction) -> None:
        self._store(str(ins.argval))

    def op_STORE_FAST_STORE_FAST(self, ins: dis.Instruction) -> None:
        for each in pair_of_names(ins):
            self._store(each)

    def op_STORE_FAST_LOAD_FAST(self, ins: dis.Instruction) -> None:
        stored, loaded = pair_of_names(ins)
        self._store(stored)
        self._load(loaded)

    def _store(self, target: str) -> None:
        value = self.pop()
        if isinstance(value, SavedVariable):
            self.renamed = {key: new for key, new in self.renamed.items() if key != target}
            self.celled = self.celled - {target} | ({target} if value.was_cell else set())
            return
        if value is HOOK or target in self.kept:
            self.hooks |= {target}
            return
        self.hooks -= {target}
        self.assign(self.renamed.get(target, target), value, is_shared=self.is_shared(target))

    def op_DELETE_FAST(self, ins: dis.Instruction) -> None:
        target = str(ins.argval)
        if target in self.hooks:
            return
        shown = self.renamed.get(target, target)
        self.rebinding(shown, has_effects=self.is_shared(target))
        self.emit(f"del {shown}")

    # -- globals

    def op_LOAD_GLOBAL(self, ins: dis.Instruction) -> None:
        with_null = sys.version_info >= (3, 11) and ins.arg is not None and ins.arg & 1
        if with_null and sys.version_info < (3, 13):
            self.push(NULL)
        title = str(ins.argval)
        self.push(self.scope.global_(title) or primary(f"globals()[{title!r}]"))
        if with_null and sys.version_info >= (3, 13):
            self.push(NULL)

    def op_LOAD_NAME(self, ins: dis.Instruction) -> None:
        self.push(shared_name(self.renamed.get(str(ins.argval), str(ins.argval))))

    def op_LOAD_BUILD_CLASS(self, ins: dis.Instruction) -> None:
        self.push(BUILD_CLASS)

    def op_LOAD_ASSERTION_ERROR(self, ins: dis.Instruction) -> None:
        self.push(name("AssertionError"))

    def op_STORE_GLOBAL(self, ins: dis.Instruction) -> None:
        value = self.pop()
        self.assign(str(ins.argval), value, is_shared=True)

    def op_DELETE_GLOBAL(self, ins: dis.Instruction) -> None:
        self.statement(f"del {ins.argval}")

    # -- attributes

    def op_LOAD_ATTR(self, ins: dis.Instruction) -> None:
        is_method = sys.version_info >= (3, 12) and ins.arg is not None and bool(ins.arg & 1)
        owner = self.pop()
        is_hook = owner is HOOK or str(ins.argval).startswith(HOOKS)
        value = HOOK if is_hook else primary(f"{owner.owner}.{ins.argval}", owner)
        self._push_method(value, is_method)

    def _push_method(self, value: Part, is_method: bool) -> None:
        """Push an attribute; for a method that is about to be called, push an empty `self` as well."""
        if is_method and sys.version_info < (3, 13):
            self.push(NULL)
        self.push(value)
        if is_method and sys.version_info >= (3, 13):
            self.push(NULL)

    def op_LOAD_METHOD(self, ins: dis.Instruction) -> None:
        owner = self.pop()
        self.push(NULL)
        self.push(HOOK if owner is HOOK else primary(f"{owner.owner}.{ins.argval}", owner))

    def op_LOAD_SPECIAL(self, ins: dis.Instruction) -> None:
        owner = self.pop()
        index = ins.arg or 0
        method = _SPECIAL[index] if index < len(_SPECIAL) else str(ins.argrepr)
        self.push(primary(f"{owner.owner}.{method}", owner))
        self.push(NULL)

    def op_LOAD_SUPER_ATTR(self, ins: dis.Instruction) -> None:
        fn, cls, own = self.pop_many(3)
        arg = ins.arg or 0
        inside = f"{cls.text}, {own.text}" if arg & 2 else ""
        value = primary(f"{fn.operand}({inside}).{ins.argval}", fn, cls, own)
        self._push_method(value, bool(arg & 1))

    def op_STORE_ATTR(self, ins: dis.Instruction) -> None:
        value, owner = self.pop_many(2)
        self.statement(f"{owner.owner}.{ins.argval} = {value.text}")

    def op_DELETE_ATTR(self, ins: dis.Instruction) -> None:
        owner = self.pop()
        self.statement(f"del {owner.owner}.{ins.argval}")

    # -- modules

    def op_IMPORT_NAME(self, ins: dis.Instruction) -> None:
        level, wanted = self.pop_many(2)
        if level.text == "0" and wanted.text == "None":
            self.push(primary(f"__import__({ins.argval!r})"))
            return
        rest = f"globals(), None, {wanted.text}, {level.text}"
        self.push(primary(f"__import__({ins.argval!r}, {rest})"))

    def op_IMPORT_FROM(self, ins: dis.Instruction) -> None:
        owner = self.once(1) if self.stack else UNKNOWN
        self.push(primary(f"{owner.owner}.{ins.argval}", owner))

    # -- shuffling

    def op_PUSH_NULL(self, ins: dis.Instruction) -> None:
        self.push(NULL)

    def op_POP_TOP(self, ins: dis.Instruction) -> None:
        value = self.pop_raw()
        if not value.is_fragile or isinstance(value, NameExpression):
            return
        if not isinstance(value, Display):
            text = value.text
            self.statement(text[1:-1] if text.startswith("(yield ") and _is_whole(text) else text)
        elif not self._is_held(value):
            self.statement(self.pinned(value).text)

    def op_COPY(self, ins: dis.Instruction) -> None:
        depth = ins.arg or 1
        self.push(self.once(depth) if len(self.stack) >= depth else UNKNOWN)

    def op_DUP_TOP(self, ins: dis.Instruction) -> None:
        self.op_COPY(ins._replace(arg=1))

    def op_DUP_TOP_TWO(self, ins: dis.Instruction) -> None:
        self.op_COPY(ins._replace(arg=2))
        self.op_COPY(ins._replace(arg=2))

    def op_SWAP(self, ins: dis.Instruction) -> None:
        depth = ins.arg or 2
        self._reorder(depth)
        self.stack[-1], self.stack[-depth] = self.stack[-depth], self.stack[-1]

    def op_ROT_N(self, ins: dis.Instruction) -> None:
        depth = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4}.get(ins.opname, ins.arg or 2)
        self._reorder(depth)
        self.stack.insert(len(self.stack) - depth, self.stack.pop())

    def _reorder(self, depth: int) -> None:
        """Prepare values for reordering: name those that must be evaluated in the old order."""
        while len(self.stack) < depth:
            self.stack.insert(0, UNKNOWN)
        if sum(part.is_fragile for part in self.stack[-depth:]) > 1:
            self.settle()


def _is_whole(text: str) -> bool:
    """Return whether the first parenthesis closes at the end; False for text with strings in it."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return position == len(text) - 1 and "'" not in text and '"' not in text
    return False
