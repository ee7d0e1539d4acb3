"""One instruction at a time on a symbolic stack; statements go out as lines.

Every method named like an opcode handles it. What several Python versions call differently is
translated by `aliases`. Jumps belong to the printer.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import CodeType
from typing import Any

from torchloom.inspect.pseudo.values import (
    HOOK,
    NULL,
    ListDisplay,
    Part,
    Value,
    clone_stack,
    compound,
    name,
    primary,
)

_IN_PLACE = ("+", "-", "*", "/", "//", "%", "@", "&", "|", "^", ">>", "<<", "**")
_OLD_BINARY = {
    "ADD": "+",
    "SUBTRACT": "-",
    "MULTIPLY": "*",
    "TRUE_DIVIDE": "/",
    "FLOOR_DIVIDE": "//",
    "MODULO": "%",
    "MATRIX_MULTIPLY": "@",
    "POWER": "**",
    "AND": "&",
    "OR": "|",
    "XOR": "^",
    "LSHIFT": "<<",
    "RSHIFT": ">>",
}
_UNARY = {"UNARY_NEGATIVE": "-", "UNARY_POSITIVE": "+", "UNARY_INVERT": "~", "UNARY_NOT": "not "}
_IGNORED = frozenset(
    [
        "NOP",
        "RESUME",
        "CACHE",
        "PRECALL",
        "EXTENDED_ARG",
        "COPY_FREE_VARS",
        "MAKE_CELL",
        "GEN_START",
        "TO_BOOL",
        "NOT_TAKEN",
        "POP_BLOCK",
        "SETUP_FINALLY",
        "POP_EXCEPT",
        "SETUP_ANNOTATIONS",
        "END_SEND",
        "GET_YIELD_FROM_ITER",
        "GET_AWAITABLE",
    ]
)
_MAX_TEXT = 4000
_KEY = re.compile(r"(-?\d*)(:?)(-?\d*)")
_GRAPH_ID = re.compile(r"(__compiled_fn_\d+)_[0-9a-f]{8}_[0-9a-f_]{27}")
_HOOKS = ("record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit")
_ASKS = "_is_profiler_enabled"
"""From 2.15 Dynamo calls the hooks under a condition, by locals that hold it, their module and a result."""


@dataclass
class Machine:
    """The state of a symbolic run: the stack, and where lines go."""

    stack: list[Part]
    emit: Callable[[str], None]
    fresh: Callable[[], str]
    """Returns a name that is not used yet."""
    consts: tuple[Any, ...] = ()
    kw_names: tuple[str, ...] = ()
    hooks: frozenset[str] = frozenset()
    """Locals that hold Dynamo's own bookkeeping."""
    kept: frozenset[str] = frozenset()
    """Those among them that never hold anything else; see `bookkeeping`."""

    def fork(self, emit: Callable[[str], None]) -> Machine:
        """Return a machine with a stack of its own, for one of two branches."""
        return replace(self, stack=clone_stack(self.stack), emit=emit)

    def step(self, ins: dis.Instruction) -> None:
        """Execute one instruction that is no jump."""
        op = ins.opname
        if op in _IGNORED:
            return
        handler = getattr(self, f"op_{_ALIASES.get(op, op)}", None)
        if handler is None:
            self._unknown(ins)
            return
        handler(ins)

    # -- the stack

    def pop_raw(self) -> Part:
        """Take the top; a stack that ran empty gives a placeholder."""
        return self.stack.pop() if self.stack else Value("<?>")

    def pop(self) -> Part:
        """Take the top for a use that is not followed: a list held elsewhere as well gets a name."""
        value = self.pop_raw()
        if isinstance(value, ListDisplay) and value.name is None and self._is_held(value):
            value.name = self._assign(value)
        return value

    def _is_held(self, wanted: ListDisplay) -> bool:
        held = (part for part in self.stack if isinstance(part, ListDisplay))
        return any(each is wanted for part in held for each in part.within())

    def _assign(self, value: Part) -> str:
        fresh = self.fresh()
        self.emit(f"{fresh} = {value.text}")
        return fresh

    def pop_many(self, count: int) -> list[Part]:
        """Take the topmost values, the deepest first."""
        return [self.pop() for _ in range(count)][::-1]

    def push(self, value: Part) -> None:
        """Put a value on top; one whose text has grown past reading gets a name."""
        if isinstance(value, Value) and len(value.text) > _MAX_TEXT:
            value = self.named(value)
        self.stack.append(value)

    def named(self, value: Part) -> Part:
        """Emit an assignment of `value` to a fresh name and return that name."""
        fresh = self._assign(value)
        if isinstance(value, ListDisplay):
            value.name = fresh
            return value
        return name(fresh)

    def settle(self, only: str | None = None) -> None:
        """Name waiting values that the next statement could change.

        Args:
            only: a local that is about to be rebound; None for a statement with any effect.
        """
        self._settle(self.stack, only)

    def _settle(self, parts: list[Part], only: str | None) -> None:
        for index, value in enumerate(parts):
            if value is NULL or value is HOOK:
                continue
            if isinstance(value, ListDisplay):
                if value.name is None:
                    self._settle(value.elements, only)
            elif value.is_fragile if only is None else only in value.reads:
                parts[index] = self.named(value)

    def statement(self, text: str) -> None:
        """Emit a statement with effects, after what waits for its old state."""
        self.settle()
        self.emit(text)

    def _unknown(self, ins: dis.Instruction) -> None:
        self.statement(f"# {ins.opname} {ins.argrepr}".rstrip())
        try:
            effect = dis.stack_effect(
                ins.opcode, ins.arg if ins.arg is not None else None, jump=False
            )
        except (ValueError, AttributeError):
            effect = 0
        for _ in range(-effect):
            self.pop()
        for _ in range(effect):
            self.push(Value(f"<{ins.opname}>"))

    # -- loads and stores

    def op_LOAD_CONST(self, ins: dis.Instruction) -> None:
        self.push(Value(constant_text(ins.argval)))

    def op_LOAD_SMALL_INT(self, ins: dis.Instruction) -> None:
        self.push(Value(str(ins.argval if ins.argval is not None else ins.arg)))

    def op_LOAD_COMMON_CONSTANT(self, ins: dis.Instruction) -> None:
        self.push(Value(ins.argrepr or str(ins.arg)))

    def op_LOAD_FAST(self, ins: dis.Instruction) -> None:
        self._load(str(ins.argval))

    def _load(self, local: str) -> None:
        self.push(HOOK if local in self.hooks else name(local))

    def op_LOAD_FAST_LOAD_FAST(self, ins: dis.Instruction) -> None:
        for each in _pair(ins):
            self._load(each)

    def op_STORE_FAST(self, ins: dis.Instruction) -> None:
        self._store(str(ins.argval))

    def op_STORE_FAST_STORE_FAST(self, ins: dis.Instruction) -> None:
        for each in _pair(ins):
            self._store(each)

    def op_STORE_FAST_LOAD_FAST(self, ins: dis.Instruction) -> None:
        stored, loaded = _pair(ins)
        self._store(stored)
        self._load(loaded)

    def _store(self, target: str) -> None:
        value = self.pop()
        if value is HOOK or target in self.kept:
            self.hooks |= {target}
            return
        self.hooks -= {target}
        self.settle(only=target)
        if value.is_fragile:
            self.settle()
        if value.text != target:
            self.emit(f"{target} = {value.text}")

    def op_DELETE_FAST(self, ins: dis.Instruction) -> None:
        if str(ins.argval) in self.hooks:
            return
        self.settle(only=str(ins.argval))
        self.emit(f"del {ins.argval}")

    def op_LOAD_GLOBAL(self, ins: dis.Instruction) -> None:
        with_null = sys.version_info >= (3, 11) and ins.arg is not None and ins.arg & 1
        if with_null and sys.version_info < (3, 13):
            self.push(NULL)
        self.push(Value(_GRAPH_ID.sub(r"\1", str(ins.argval))))
        if with_null and sys.version_info >= (3, 13):
            self.push(NULL)

    def op_LOAD_NAME(self, ins: dis.Instruction) -> None:
        self.push(Value(str(ins.argval)))

    def op_LOAD_BUILD_CLASS(self, ins: dis.Instruction) -> None:
        self.push(Value("__build_class__"))

    def op_LOAD_ASSERTION_ERROR(self, ins: dis.Instruction) -> None:
        self.push(Value("AssertionError"))

    def op_LOAD_ATTR(self, ins: dis.Instruction) -> None:
        owner = self.pop()
        is_hook = owner is HOOK or str(ins.argval).startswith(_HOOKS)
        is_method = sys.version_info >= (3, 12) and ins.arg is not None and ins.arg & 1
        if is_method and sys.version_info < (3, 13):
            self.push(NULL)
        self.push(HOOK if is_hook else primary(f"{owner.operand}.{ins.argval}", owner))
        if is_method and sys.version_info >= (3, 13):
            self.push(NULL)

    def op_LOAD_METHOD(self, ins: dis.Instruction) -> None:
        owner = self.pop()
        self.push(NULL)
        self.push(HOOK if owner is HOOK else primary(f"{owner.operand}.{ins.argval}", owner))

    def op_LOAD_SUPER_ATTR(self, ins: dis.Instruction) -> None:
        self.pop_many(3)
        if ins.arg is not None and ins.arg & 1 and sys.version_info < (3, 13):
            self.push(NULL)
        self.push(primary(f"super().{ins.argval}"))
        if ins.arg is not None and ins.arg & 1 and sys.version_info >= (3, 13):
            self.push(NULL)

    def op_STORE_ATTR(self, ins: dis.Instruction) -> None:
        value, owner = self.pop_many(2)
        self.statement(f"{owner.operand}.{ins.argval} = {value.text}")

    def op_DELETE_ATTR(self, ins: dis.Instruction) -> None:
        self.statement(f"del {self.pop().operand}.{ins.argval}")

    def op_STORE_GLOBAL(self, ins: dis.Instruction) -> None:
        value = self.pop()
        self.statement(f"global {ins.argval}; {ins.argval} = {value.text}")

    def op_DELETE_GLOBAL(self, ins: dis.Instruction) -> None:
        self.statement(f"del {ins.argval}")

    def op_PUSH_NULL(self, ins: dis.Instruction) -> None:
        self.push(NULL)

    # -- shuffling

    def op_POP_TOP(self, ins: dis.Instruction) -> None:
        value = self.pop_raw()
        if value is not NULL and value.is_fragile and not isinstance(value, ListDisplay):
            self.statement(value.text)

    def op_COPY(self, ins: dis.Instruction) -> None:
        depth = ins.arg or 1
        if len(self.stack) >= depth:
            value = self.stack[-depth]
            is_list = isinstance(value, ListDisplay)
            if not is_list and (
                not value.is_atom or value.is_fragile
            ):  # evaluated once, used twice
                value = self.stack[-depth] = self.named(value)
            self.push(value)
        else:
            self.push(Value("<?>"))

    def op_DUP_TOP(self, ins: dis.Instruction) -> None:
        self.op_COPY(ins._replace(arg=1))

    def op_DUP_TOP_TWO(self, ins: dis.Instruction) -> None:
        self.op_COPY(ins._replace(arg=2))
        self.op_COPY(ins._replace(arg=2))

    def op_SWAP(self, ins: dis.Instruction) -> None:
        depth = ins.arg or 2
        while len(self.stack) < depth:
            self.stack.insert(0, Value("<?>"))
        self.stack[-1], self.stack[-depth] = self.stack[-depth], self.stack[-1]

    def op_ROT_N(self, ins: dis.Instruction) -> None:
        depth = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4}.get(ins.opname, ins.arg or 2)
        while len(self.stack) < depth:
            self.stack.insert(0, Value("<?>"))
        self.stack.insert(len(self.stack) - depth, self.stack.pop())

    # -- operators

    def op_BINARY_OP(self, ins: dis.Instruction) -> None:
        self._binary(ins.argrepr)

    def _binary(self, operator: str) -> None:
        right, left = self.pop(), self.pop_raw()
        if operator in ("[]", ""):
            if isinstance(left, ListDisplay) and self._subscript(left, right.text):
                return
            self.push(primary(f"{left.operand}[{right.text}]", left, right))
        elif operator.endswith("=") and operator[:-1] in _IN_PLACE:
            # The left side may be changed in place: it is a statement, and its result has a name.
            self.settle()
            target = left if left.is_atom and not left.is_fragile else self.named(left)
            self.emit(f"{target.text} {operator} {right.text}")
            self.push(target)
        else:
            self.push(compound(f"{left.operand} {operator} {right.operand}", left, right))

    def _subscript(self, owner: ListDisplay, key: str) -> bool:
        """Push an element or a part of a list that is known; say whether that could be done."""
        place = _place(key)
        if place is None or not owner.is_open:
            return False
        if isinstance(place, slice):
            for index in range(*place.indices(len(owner.elements))):
                self._keep(owner, index)
            self.push(ListDisplay(list(owner.elements[place])))
            return True
        if not -len(owner.elements) <= place < len(owner.elements):
            return False
        self._keep(owner, place)
        self.push(owner.elements[place])
        return True

    def _keep(self, owner: ListDisplay, index: int) -> None:
        """Give an element that is about to stand in two places a name, if it costs to evaluate."""
        part = owner.elements[index]
        if isinstance(part, Value) and (part.is_fragile or not part.is_atom):
            owner.elements[index] = self.named(part)

    def op_OLD_BINARY(self, ins: dis.Instruction) -> None:
        kind, _, word = ins.opname.partition("_")
        self._binary(_OLD_BINARY[word] + ("=" if kind == "INPLACE" else ""))

    def op_UNARY(self, ins: dis.Instruction) -> None:
        value = self.pop()
        self.push(compound(f"{_UNARY[ins.opname]}{value.operand}", value))

    def op_COMPARE_OP(self, ins: dis.Instruction) -> None:
        left, right = self.pop_many(2)
        operator = str(ins.argval) if isinstance(ins.argval, str) else ins.argrepr
        if operator.startswith("bool("):
            operator = operator[5:-1]
        self.push(compound(f"{left.operand} {operator} {right.operand}", left, right))

    def op_IS_OP(self, ins: dis.Instruction) -> None:
        left, right = self.pop_many(2)
        if left is HOOK:
            self.push(HOOK)
            return
        self.push(
            compound(f"{left.operand} is{' not' if ins.arg else ''} {right.operand}", left, right)
        )

    def op_CONTAINS_OP(self, ins: dis.Instruction) -> None:
        left, right = self.pop_many(2)
        word = "not in" if ins.arg else "in"
        self.push(compound(f"{left.operand} {word} {right.operand}", left, right))

    def op_BINARY_SUBSCR(self, ins: dis.Instruction) -> None:
        self._binary("[]")

    def op_BINARY_SLICE(self, ins: dis.Instruction) -> None:
        stop, start, owner = self.pop(), self.pop(), self.pop_raw()
        key = _slice(start, stop)
        if isinstance(owner, ListDisplay) and self._subscript(owner, key):
            return
        self.push(primary(f"{owner.operand}[{key}]", owner, start, stop))

    def op_STORE_SUBSCR(self, ins: dis.Instruction) -> None:
        key, owner, value = self.pop(), self.pop_raw(), self.pop_raw()
        place = _place(key.text)
        if isinstance(owner, ListDisplay) and owner.is_open and self._is_held(owner):
            if isinstance(place, slice) and isinstance(value, ListDisplay) and value.is_open:
                owner.elements[place] = list(value.elements)
                return
            if isinstance(place, int) and -len(owner.elements) <= place < len(owner.elements):
                owner.elements[place] = value
                return
        self.statement(f"{owner.operand}[{key.text}] = {value.text}")

    def op_STORE_SLICE(self, ins: dis.Instruction) -> None:
        stop, start, owner, value = self.pop(), self.pop(), self.pop_raw(), self.pop_raw()
        place = _place(_slice(start, stop))
        both_open = isinstance(owner, ListDisplay) and isinstance(value, ListDisplay)
        if both_open and owner.is_open and value.is_open and isinstance(place, slice):
            owner.elements[place] = list(value.elements)
            return
        self.statement(f"{owner.operand}[{_slice(start, stop)}] = {value.text}")

    def op_DELETE_SUBSCR(self, ins: dis.Instruction) -> None:
        key, owner = self.pop(), self.pop_raw()
        place = _place(key.text)
        if isinstance(owner, ListDisplay) and owner.is_open and place is not None:
            size = len(owner.elements)
            if isinstance(place, slice) or -size <= place < size:
                del owner.elements[place]
                return
        self.statement(f"del {owner.operand}[{key.text}]")

    def op_GET_LEN(self, ins: dis.Instruction) -> None:
        self.op_COPY(ins._replace(arg=1))
        self.push(primary(f"len({self.pop().text})"))

    def op_GET_ITER(self, ins: dis.Instruction) -> None:
        value = self.pop()
        self.push(Value(value.text, value.is_atom, True, value.reads))

    # -- displays

    def op_BUILD_TUPLE(self, ins: dis.Instruction) -> None:
        self._display("(", ")", ins.arg or 0)

    def op_BUILD_LIST(self, ins: dis.Instruction) -> None:
        count = ins.arg or 0
        self.push(ListDisplay([self.pop_raw() for _ in range(count)][::-1]))

    def op_BUILD_SET(self, ins: dis.Instruction) -> None:
        self._display("{", "}", ins.arg or 0)

    def _display(self, opening: str, closing: str, count: int) -> None:
        parts = self.pop_many(count)
        self.push(_display(opening, closing, parts))

    def op_BUILD_MAP(self, ins: dis.Instruction) -> None:
        flat = self.pop_many(2 * (ins.arg or 0))
        pairs = [
            compound(f"{key.text}: {value.text}", key, value)
            for key, value in zip(flat[::2], flat[1::2], strict=True)
        ]
        self.push(_display("{", "}", pairs, is_map=True))

    def op_BUILD_CONST_KEY_MAP(self, ins: dis.Instruction) -> None:
        keys = self.pop()
        values = self.pop_many(ins.arg or 0)
        texts = _constant_items(keys.text)
        if len(texts) != len(values):
            texts = [f"<key {i}>" for i in range(len(values))]
        pairs = [compound(f"{key}: {v.text}", v) for key, v in zip(texts, values, strict=True)]
        self.push(_display("{", "}", pairs, is_map=True))

    def op_BUILD_STRING(self, ins: dis.Instruction) -> None:
        parts = self.pop_many(ins.arg or 0)
        self.push(compound(" + ".join(part.operand for part in parts) or "''", *parts))

    def op_BUILD_SLICE(self, ins: dis.Instruction) -> None:
        self.push(_sliced(self.pop_many(ins.arg or 2)))

    def op_LIST_EXTEND(self, ins: dis.Instruction) -> None:
        self._extend(ins, "*")

    def op_DICT_UPDATE(self, ins: dis.Instruction) -> None:
        self._extend(ins, "**")

    def _extend(self, ins: dis.Instruction, star: str) -> None:
        added = self.pop()
        depth = ins.arg or 1
        target = self.stack[-depth] if len(self.stack) >= depth else None
        if isinstance(target, ListDisplay) and target.name is None:
            if added.items is not None and star == "*":
                target.elements += added.items
            else:
                target.elements.append(compound(f"*{added.operand}", added))
            return
        self._grow(depth, compound(f"{star}{added.operand}", added))

    def op_LIST_APPEND(self, ins: dis.Instruction) -> None:
        self._grow(ins.arg or 1, self.pop())

    def op_MAP_ADD(self, ins: dis.Instruction) -> None:
        key, value = self.pop_many(2)
        self._grow(ins.arg or 1, compound(f"{key.text}: {value.text}", key, value))

    def _grow(self, depth: int, item: Part) -> None:
        if len(self.stack) < depth:
            self.emit(f"# adds {item.text}")
            return
        target = self.stack[-depth]
        if isinstance(target, ListDisplay) and target.name is None:
            target.elements.append(item)
            return
        if target.items is None:
            how = (
                "update"
                if item.text.startswith("**")
                else "extend"
                if item.text[:1] == "*"
                else "add"
            )
            self.statement(f"{target.operand}.{how}({item.text.lstrip('*')})")
            return
        opening, closing = target.text[0], target.text[-1]
        is_map = opening == "{" and (":" in item.text or item.text.startswith("**"))
        self.stack[-depth] = _display(opening, closing, [*target.items, item], is_map=is_map)

    def op_LIST_TO_TUPLE(self, ins: dis.Instruction) -> None:
        value = self.pop()
        self.push(
            compound(f"tuple({value.text})", value)
            if value.items is None
            else _display("(", ")", list(value.items))
        )

    def op_UNPACK_SEQUENCE(self, ins: dis.Instruction) -> None:
        value = self.pop()
        self.settle()
        names = [self.fresh() for _ in range(ins.arg or 0)]
        self.emit(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {value.text}")
        for each in reversed(names):
            self.push(name(each))

    def op_UNPACK_EX(self, ins: dis.Instruction) -> None:
        value, arg = self.pop(), ins.arg or 0
        before, after = (
            [self.fresh() for _ in range(arg & 255)],
            [self.fresh() for _ in range(arg >> 8)],
        )
        rest = self.fresh()
        self.statement(f"{', '.join([*before, f'*{rest}', *after])} = {value.text}")
        for each in reversed([*before, rest, *after]):
            self.push(name(each))

    # -- text

    def op_FORMAT_VALUE(self, ins: dis.Instruction) -> None:
        arg = ins.arg or 0
        spec = self.pop() if arg & 4 else None
        value = self.pop()
        wrap = {1: "str", 2: "repr", 3: "ascii"}.get(arg & 3)
        text = f"{wrap}({value.text})" if wrap else value.text
        extra = "" if spec is None else f", {spec.text}"
        self.push(primary(f"format({text}{extra})", value))

    def op_FORMAT_SIMPLE(self, ins: dis.Instruction) -> None:
        value = self.pop()
        self.push(primary(f"format({value.text})", value))

    def op_FORMAT_WITH_SPEC(self, ins: dis.Instruction) -> None:
        value, spec = self.pop_many(2)
        self.push(primary(f"format({value.text}, {spec.text})", value, spec))

    def op_CONVERT_VALUE(self, ins: dis.Instruction) -> None:
        value = self.pop()
        wrap = {1: "str", 2: "repr", 3: "ascii"}.get(ins.arg or 1, "str")
        self.push(primary(f"{wrap}({value.text})", value))

    # -- calls

    def op_KW_NAMES(self, ins: dis.Instruction) -> None:
        found = self.consts[ins.arg or 0]  # dis of 3.11 does not resolve it
        self.kw_names = tuple(str(each) for each in found)

    def op_CALL(self, ins: dis.Instruction) -> None:
        names, self.kw_names = self.kw_names, ()
        self._call(ins.arg or 0, names)

    def op_CALL_KW(self, ins: dis.Instruction) -> None:
        names = tuple(_unquote(text) for text in _constant_items(self.pop().text))
        self._call(ins.arg or 0, names)

    def _call(self, count: int, kw_names: Sequence[str]) -> None:
        args = self.pop_many(count)
        if sys.version_info >= (3, 13):
            fn, receiver = self.pop_many(2)
        else:
            receiver, fn = self.pop_many(2)
            # An unbound method is (function, self); a plain function is (NULL, function).
            if receiver is not NULL:
                receiver, fn = fn, receiver
        if receiver is not NULL:
            args = [receiver, *args]
        self._push_call(fn, args, kw_names)

    def op_CALL_FUNCTION(self, ins: dis.Instruction) -> None:
        args = self.pop_many(ins.arg or 0)
        self._push_call(self.pop(), args, ())

    def op_CALL_FUNCTION_KW(self, ins: dis.Instruction) -> None:
        names = tuple(_unquote(text) for text in _constant_items(self.pop().text))
        args = self.pop_many(ins.arg or 0)
        self._push_call(self.pop(), args, names)

    def op_CALL_METHOD(self, ins: dis.Instruction) -> None:
        args = self.pop_many(ins.arg or 0)
        receiver, fn = self.pop_many(2)
        if receiver is not NULL:
            receiver, fn = fn, receiver
            args = [receiver, *args]
        self._push_call(fn, args, ())

    def op_CALL_FUNCTION_EX(self, ins: dis.Instruction) -> None:
        has_kwargs = sys.version_info >= (3, 14) or (ins.arg or 0) & 1
        kwargs = self.pop() if has_kwargs else NULL
        args = self.pop()
        around = self.pop_many(2) if sys.version_info >= (3, 11) else [self.pop()]
        fn = next((value for value in around if value is not NULL), Value("<?>"))
        parts = [_starred("*", args)]
        if kwargs is not NULL:
            parts.append(_starred("**", kwargs))
        self._push_call(fn, [part for part in parts if part.text], ())

    def _push_call(self, fn: Part, args: Sequence[Part], kw_names: Sequence[str]) -> None:
        if fn is HOOK:
            self.push(HOOK)
            return
        split = len(args) - len(kw_names)
        texts = [arg.text for arg in args[:split]]
        texts += [f"{key}={arg.text}" for key, arg in zip(kw_names, args[split:], strict=False)]
        # Whatever waits below was evaluated before this call, which may change it.
        self.settle()
        self.push(primary(f"{fn.operand}({', '.join(texts)})", fn, *args))

    def op_CALL_INTRINSIC_1(self, ins: dis.Instruction) -> None:
        what = ins.argrepr
        if "LIST_TO_TUPLE" in what:
            self.op_LIST_TO_TUPLE(ins)
        elif "UNARY_POSITIVE" in what:
            value = self.pop()
            self.push(compound(f"+{value.operand}", value))
        else:
            value = self.pop()
            self.push(primary(f"{what.lower()}({value.text})", value))

    def op_CALL_INTRINSIC_2(self, ins: dis.Instruction) -> None:
        left, right = self.pop_many(2)
        self.push(primary(f"{ins.argrepr.lower()}({left.text}, {right.text})", left, right))

    def op_MAKE_FUNCTION(self, ins: dis.Instruction) -> None:
        if sys.version_info >= (3, 13):
            code = self.pop()
        else:
            if sys.version_info < (3, 11):
                self.pop()
            code = self.pop()
            flags = ins.arg or 0
            self.pop_many(bin(flags & 15).count("1"))
        self.push(primary(f"function({code.text})", fragile=False))

    def op_SET_FUNCTION_ATTRIBUTE(self, ins: dis.Instruction) -> None:
        _, fn = self.pop_many(2)
        self.push(fn)

    # -- the rest

    def op_IMPORT_NAME(self, ins: dis.Instruction) -> None:
        self.pop_many(2)
        self.push(primary(f"__import__({ins.argval!r})"))

    def op_IMPORT_FROM(self, ins: dis.Instruction) -> None:
        owner = self.stack[-1] if self.stack else Value("<?>")
        self.push(primary(f"{owner.operand}.{ins.argval}", owner))

    def op_YIELD_VALUE(self, ins: dis.Instruction) -> None:
        value = self.pop()
        self.settle()
        self.push(compound(f"yield {value.text}", value, fragile=True))

    def op_BEFORE_WITH(self, ins: dis.Instruction) -> None:
        value = self.pop()
        self.settle()
        entered = self.fresh()
        self.emit(f"{entered} = enter({value.text})  # with")
        self.push(Value(f"exit_of_{entered}"))
        self.push(name(entered))

    def op_RETURN_GENERATOR(self, ins: dis.Instruction) -> None:
        self.push(NULL)

    def op_END_FOR(self, ins: dis.Instruction) -> None:
        """The printer has popped the iterator already."""


def bookkeeping(instructions: Sequence[dis.Instruction]) -> frozenset[str]:
    """Return the locals that serve Dynamo's hooks alone: the condition, the module, the result (2.15)."""
    found = set()
    for before, ins in pairwise(instructions):
        is_call = str(ins.argval).startswith(_HOOKS) and before.opname.startswith("LOAD_FAST")
        if is_call:
            found.add(str(before.argval))
        if is_call or (ins.argval == _ASKS and str(before.argval).startswith("__import_torch")):
            after = (each for each in instructions if each.offset > ins.offset)
            follows = next(
                (each for each in after if each.opname in ("STORE_FAST", "POP_TOP")), ins
            )
            if follows.opname == "STORE_FAST":
                found.add(str(follows.argval))
    return frozenset(found)


def _pair(ins: dis.Instruction) -> tuple[str, str]:
    if isinstance(ins.argval, tuple):
        first, second = ins.argval
        return str(first), str(second)
    first, _, second = ins.argrepr.partition(",")
    return first.strip(), second.strip()


def _slice(start: Part, stop: Part) -> str:
    left, right = ("" if each.text == "None" else each.text for each in (start, stop))
    return f"{left}:{right}"


def _place(key: str) -> int | slice | None:
    """Return the index or slice that the text of a constant key stands for, None for any other."""
    found = _KEY.fullmatch(key)
    if not found:
        return None
    start, colon, stop = found.groups()
    if not colon:
        return int(start) if start else None
    return slice(int(start) if start else None, int(stop) if stop else None)


def _sliced(parts: Sequence[Part]) -> Value:
    texts = ["" if part.text == "None" else part.text for part in parts]
    return compound(":".join(texts), *parts)


def _display(opening: str, closing: str, parts: Sequence[Part], *, is_map: bool = False) -> Value:
    texts = [part.text for part in parts]
    inside = ", ".join(texts)
    if opening == "(" and len(texts) == 1:
        inside += ","
    if opening == "{" and not texts and not is_map:
        return replace(primary("set()", fragile=False), items=())
    value = primary(f"{opening}{inside}{closing}", *parts, fragile=False)
    return replace(value, items=tuple(parts))


def _starred(star: str, value: Part) -> Value:
    """Return the arguments in a tuple or dict display without the display."""
    if value.items is not None and star == "*":
        return Value(", ".join(item.text for item in value.items), reads=value.reads)
    if value.items is not None and all(": " in item.text for item in value.items):
        pairs = [item.text.partition(": ") for item in value.items]
        if all(_unquote(key).isidentifier() for key, _, _ in pairs):
            text = ", ".join(f"{_unquote(key)}={item}" for key, _, item in pairs)
            return Value(text, reads=value.reads)
    if value.text == "()":
        return Value("")
    return Value(f"{star}{value.operand}", False, value.is_fragile, value.reads)


def _constant_items(text: str) -> list[str]:
    """Split the text of a tuple of constants at its commas."""
    inside = text.strip()[1:-1]
    items, depth, quote, current = [], 0, "", ""
    for char in inside:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if char == "," and depth == 0 and not quote:
            items.append(current.strip())
            current = ""
        else:
            current += char
    if current.strip():
        items.append(current.strip())
    return items


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def constant_text(value: Any) -> str:
    """Return the text of a constant; code objects by name, long ones shortened, no addresses."""
    if isinstance(value, CodeType):
        return f"<code {value.co_name}>"
    if isinstance(value, tuple):
        inside = ", ".join(constant_text(each) for each in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, slice):
        parts = [value.start, value.stop] + ([] if value.step is None else [value.step])
        return ":".join("" if part is None else constant_text(part) for part in parts)
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001
        return f"<{type(value).__name__}>"
    if " at 0x" in text:
        return f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:190]}...{text[-1]}"


_ALIASES = {
    **dict.fromkeys(_UNARY, "UNARY"),
    **{f"{kind}_{word}": "OLD_BINARY" for kind in ("BINARY", "INPLACE") for word in _OLD_BINARY},
    **dict.fromkeys(("ROT_TWO", "ROT_THREE", "ROT_FOUR"), "ROT_N"),
    **dict.fromkeys(
        (
            "LOAD_FAST_CHECK",
            "LOAD_FAST_AND_CLEAR",
            "LOAD_FAST_BORROW",
            "LOAD_DEREF",
            "LOAD_CLASSDEREF",
            "LOAD_CLOSURE",
            "LOAD_FROM_DICT_OR_DEREF",
        ),
        "LOAD_FAST",
    ),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": "LOAD_FAST_LOAD_FAST",
    **dict.fromkeys(("STORE_DEREF", "STORE_NAME"), "STORE_FAST"),
    **dict.fromkeys(("DELETE_DEREF", "DELETE_NAME"), "DELETE_FAST"),
    "LOAD_FROM_DICT_OR_GLOBALS": "LOAD_NAME",
    "SET_UPDATE": "LIST_EXTEND",
    "DICT_MERGE": "DICT_UPDATE",
    "SET_ADD": "LIST_APPEND",
    "SETUP_WITH": "BEFORE_WITH",
    "LOAD_SPECIAL": "LOAD_ATTR",
}
