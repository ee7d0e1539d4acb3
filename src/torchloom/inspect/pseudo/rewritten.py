"""Code that Dynamo wrote, as statements: calls of graphs and continuations, branches, what is stored.

Its instructions run on a stack of texts. Dynamo hands values on in lists that it fills, cuts and empties: those are
lists of texts here, on which the same is done. Each of its branches goes forward and ends in a return. An instruction
that is not known becomes a comment, as `dis` prints it.
"""

from __future__ import annotations

import copy
import dis
import sys
from collections.abc import Collection, Mapping
from types import CodeType
from typing import Any

GRAPH = "__compiled_fn_"
CONTINUATION = "__resume_at_"
_PROFILER = "<profiler>"
"""The value of what Dynamo calls for profilers before and behind a graph: not shown."""
_PROFILERS = ("record_pregraph_bytecode_", "_is_profiler_enabled")
_KEEPS_CALL = ("STORE_FAST", "RETURN_VALUE", "POP_TOP", "DELETE_FAST", "CACHE")
"""Instructions that take the result of a call, or leave it where it is."""
_IGNORED = frozenset(
    {"NOP", "RESUME", "CACHE", "PRECALL", "EXTENDED_ARG", "COPY_FREE_VARS", "MAKE_CELL"}
    | {"TO_BOOL", "NOT_TAKEN", "DELETE_FAST"}
)
_HANDLERS = ("PUSH_EXC_INFO", "SETUP_FINALLY", "SETUP_WITH")
_NULL = object()
"""What Python puts beside a callable that is no method."""


class _Call(str):
    """The text of a call that has been made, whose result nothing has taken yet."""

    __slots__ = ()


def statements(code: CodeType, reached: Collection[int], texts: Mapping[int, str]) -> list[str]:
    """Return the statements of a function that Dynamo wrote.

    Args:
        code: without values of the program.
        reached: offsets of the instructions to show.
        texts: the user's line that begins at an offset.
    """
    printer = _Printer(code.co_consts, texts)
    every = list(dis.get_instructions(code))
    shown = [ins for ins in every if ins.offset in reached]
    for ins, following in zip(shown, [*shown[1:], None], strict=True):
        is_next = following is not None and following.offset == ins.argval
        if not (ins.opname == "JUMP_FORWARD" and is_next):
            printer.step(ins)
    if any(ins.opname in _HANDLERS for ins in every):
        printer.lines.append("# exception handlers are not shown")
    return printer.lines


class _Printer:
    def __init__(self, consts: tuple[Any, ...], texts: Mapping[int, str]) -> None:
        self.lines: list[str] = []
        self._consts, self._texts = consts, texts
        self._stack: list[Any] = []
        self._depth, self._num_results = 0, 0
        self._joins: dict[int, tuple[int, list[Any]]] = {}
        """Depth and stack at the targets of jumps."""
        self._keywords: tuple[str, ...] = ()
        self._kept: dict[str, Any] = {}
        """What is in the local variables in which Dynamo keeps a value that it needs again."""

    def step(self, ins: dis.Instruction) -> None:
        """Run one instruction."""
        if self._stack and isinstance(self._stack[-1], _Call) and ins.opname not in _KEEPS_CALL:
            self._num_results += 1
            self._emit(f"t{self._num_results} = {self._stack[-1]}")
            self._stack[-1] = f"t{self._num_results}"
        if ins.offset in self._joins:
            self._depth, self._stack = self._joins.pop(ins.offset)
        if ins.offset in self._texts:
            self._emit(f"# {self._texts[ins.offset]}")
        if ins.opname in _IGNORED:
            return
        if ins.opname.startswith("POP_JUMP_") and "BACKWARD" not in ins.opname:
            self._branch(ins)
        else:
            getattr(self, f"_{_ALIASES.get(ins.opname, ins.opname)}", self._other)(ins)

    def _emit(self, line: str) -> None:
        if self.lines and self.lines[-1].strip() == f"# {line}":
            self.lines.pop()  # the user's line says the same
        self.lines.append("    " * self._depth + line)

    def _pop(self) -> Any:
        return self._stack.pop() if self._stack else "<?>"

    def _pops(self, number: int) -> list[Any]:
        return [self._pop() for _ in range(number)][::-1]

    def _other(self, ins: dis.Instruction) -> None:
        self._emit(f"# {ins.opname} {ins.argrepr}".rstrip())
        effect = dis.stack_effect(ins.opcode, ins.arg, jump=False)
        self._pops(-effect)
        self._stack += [f"<{ins.opname}>"] * effect

    # -- loads and stores

    def _LOAD_FAST(self, ins: dis.Instruction) -> None:
        for name in ins.argval if isinstance(ins.argval, tuple) else (ins.argval,):
            self._stack.append(self._kept.get(name, name))

    def _LOAD_GLOBAL(self, ins: dis.Instruction) -> None:
        self._push_callable(ins.argval, ins)

    def _LOAD_ATTR(self, ins: dis.Instruction) -> None:
        is_hook = ins.argval.startswith(_PROFILERS)
        owner = _text(self._pop())
        self._push_callable(_PROFILER if is_hook else f"{owner}.{ins.argval}", ins)

    def _push_callable(self, text: str, ins: dis.Instruction) -> None:
        """Push a value, and what makes a call of it where it is about to be called."""
        is_called = "NULL" in ins.argrepr or ins.opname == "LOAD_METHOD"
        order = 1 if sys.version_info >= (3, 13) else -1
        self._stack += [text, _NULL][::order] if is_called else [text]

    def _LOAD_CONST(self, ins: dis.Instruction) -> None:
        self._stack.append(_constant(ins.argval))

    def _PUSH_NULL(self, ins: dis.Instruction) -> None:
        self._stack.append(_NULL)

    def _STORE_FAST(self, ins: dis.Instruction) -> None:
        value = self._pop()
        if value == _PROFILER or (ins.argval.startswith("tmp_") and not isinstance(value, _Call)):
            self._kept[ins.argval] = value
        else:
            self._emit(f"{ins.argval} = {_text(value)}")

    def _STORE_ATTR(self, ins: dis.Instruction) -> None:
        value, owner = map(_text, self._pops(2))
        self._emit(f"{owner}.{ins.argval} = {value}")

    def _POP_TOP(self, ins: dis.Instruction) -> None:
        value = self._pop()
        if isinstance(value, _Call):
            self._emit(value)

    # -- lists that hold values

    def _COPY(self, ins: dis.Instruction) -> None:
        self._stack.append(self._stack[-(ins.arg or 1)])

    def _SWAP(self, ins: dis.Instruction) -> None:
        at = -(ins.arg or 2)
        self._stack[at], self._stack[-1] = self._stack[-1], self._stack[at]

    def _ROT_N(self, ins: dis.Instruction) -> None:
        number = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4}.get(ins.opname, ins.arg or 1)
        self._stack.insert(len(self._stack) - number, self._pop())

    def _BUILD_LIST(self, ins: dis.Instruction) -> None:
        parts = self._pops(ins.arg or 0)
        self._stack.append(parts if ins.opname == "BUILD_LIST" else tuple(parts))

    def _BUILD_MAP(self, ins: dis.Instruction) -> None:
        parts = [_text(each) for each in self._pops(2 * (ins.arg or 0))]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        self._stack.append(f"{{{', '.join(f'{key}: {value}' for key, value in pairs)}}}")

    def _BUILD_SLICE(self, ins: dis.Instruction) -> None:
        self._stack.append(slice(*self._pops(ins.arg or 2)))

    def _LIST_EXTEND(self, ins: dis.Instruction) -> None:
        values, into = self._pop(), self._stack[-(ins.arg or 1)]
        if isinstance(into, list):
            into += values if isinstance(values, (list, tuple)) else [f"*{values}"]

    def _BINARY_SUBSCR(self, ins: dis.Instruction) -> None:
        owner, index = self._pops(2)
        is_known = isinstance(owner, (list, tuple)) and isinstance(index, (int, slice))
        self._stack.append(owner[index] if is_known else f"{_text(owner)}[{_text(index)}]")

    def _BINARY_OP(self, ins: dis.Instruction) -> None:
        (self._BINARY_SUBSCR if ins.argrepr == "[]" else self._other)(ins)

    def _STORE_SUBSCR(self, ins: dis.Instruction) -> None:
        value, owner, index = self._pops(3)
        if isinstance(owner, list):
            owner[index] = value
        else:
            self._emit(f"{_text(owner)}[{_text(index)}] = {_text(value)}")

    def _DELETE_SUBSCR(self, ins: dis.Instruction) -> None:
        owner, index = self._pops(2)
        if isinstance(owner, list):
            del owner[index]
        else:
            self._emit(f"del {_text(owner)}[{_text(index)}]")

    # -- calls and ends

    def _KW_NAMES(self, ins: dis.Instruction) -> None:
        self._keywords = tuple(map(str, self._consts[ins.arg or 0]))

    def _CALL(self, ins: dis.Instruction) -> None:
        if ins.opname.endswith("KW"):
            self._keywords = tuple(each.strip("'") for each in _parts(self._pop()))
        args = [_text(each) for each in self._pops(ins.arg or 0)]
        first = len(args) - len(self._keywords)
        for i, name in enumerate(self._keywords):
            args[first + i] = f"{name}={args[first + i]}"
        self._keywords = ()
        self._called(args, 1 if ins.opname.startswith("CALL_FUNCTION") else 2)

    def _CALL_FUNCTION_EX(self, ins: dis.Instruction) -> None:
        # From 3.14 on there is always a mapping, or NULL in its place.
        mapping = self._pop() if ins.arg is None or ins.arg & 1 else _NULL
        args = [_text(each) for each in _parts(self._pop())]
        args += [] if mapping is _NULL else [f"**{_text(mapping)}"]
        has_null = len(self._stack) > 1 and _NULL in self._stack[-2:]
        self._called(args, 2 if has_null else 1)

    def _called(self, args: list[str], number: int) -> None:
        """Push the call of what lies on the stack, a callable and maybe what Python puts beside it."""
        callee = next((_text(each) for each in self._pops(number) if each is not _NULL), "<?>")
        text = f"{callee}({', '.join(args)})"
        is_value = callee.startswith(CONTINUATION) and not callee.endswith(")")  # makes a function
        self._stack.append(_PROFILER if callee == _PROFILER else text if is_value else _Call(text))

    def _RETURN_VALUE(self, ins: dis.Instruction) -> None:
        self._emit(f"return {_text(self._pop())}")

    def _RETURN_CONST(self, ins: dis.Instruction) -> None:
        self._emit(f"return {_text(_constant(ins.argval))}")

    def _branch(self, ins: dis.Instruction) -> None:
        value, kind = _text(self._pop()), ins.opname.partition("IF_")[2]
        if value == _PROFILER:
            return
        words = {
            "FALSE": "{}",
            "TRUE": "not {}",
            "NONE": "{} is not None",
            "NOT_NONE": "{} is None",
        }
        self._joins[ins.argval] = self._depth, copy.deepcopy(self._stack)
        self._emit(f"if {words[kind].format(value)}:")
        self._depth += 1


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_text(each) for each in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, slice):
        return ":".join("" if each is None else _text(each) for each in (value.start, value.stop))
    return str(value)


def _constant(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(_constant(each) for each in value)
    if type(value) is int or value is None:
        return value  # may be an index
    return f"<code {value.co_name}>" if isinstance(value, CodeType) else repr(value)


def _parts(value: Any) -> list[Any]:
    """Return the positional arguments that a call gets as one value."""
    return list(value) if isinstance(value, (list, tuple)) else [f"*{_text(value)}"]


_ALIASES = {
    **dict.fromkeys(("LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE"), "LOAD_FAST"),
    **dict.fromkeys(("LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST"), "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": "LOAD_FAST",
    **dict.fromkeys(("STORE_NAME", "STORE_DEREF", "STORE_GLOBAL"), "STORE_FAST"),
    **dict.fromkeys(("LOAD_SMALL_INT", "LOAD_CONST_IMMORTAL"), "LOAD_CONST"),
    **dict.fromkeys(("CALL_FUNCTION", "CALL_METHOD", "CALL_FUNCTION_KW", "CALL_KW"), "CALL"),
    **dict.fromkeys(("ROT_TWO", "ROT_THREE", "ROT_FOUR"), "ROT_N"),
    "BUILD_TUPLE": "BUILD_LIST",
    "DUP_TOP": "COPY",
    "LOAD_METHOD": "LOAD_ATTR",
}
"""Opcodes that do what another one does, or have another name in some Python versions."""
