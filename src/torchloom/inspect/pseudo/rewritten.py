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
_LOADS = frozenset(
    {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST"}
    | {"LOAD_FAST_BORROW_LOAD_FAST_BORROW", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE"}
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
        self._runs = (self._moved, self._read, self._stored, self._edited, self._called)
        """Each runs instructions of its sort, and returns whether it knows the one that it is given."""
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
        elif not any(run(ins) for run in self._runs):
            self._emit(f"# {ins.opname} {ins.argrepr}".rstrip())
            effect = dis.stack_effect(ins.opcode, ins.arg, jump=False)
            self._pops(-effect)
            self._stack += [f"<{ins.opname}>"] * effect

    def _emit(self, line: str) -> None:
        if self.lines and self.lines[-1].strip() == f"# {line}":
            self.lines.pop()  # the user's line says the same
        self.lines.append("    " * self._depth + line)

    def _pop(self) -> Any:
        return self._stack.pop() if self._stack else "<?>"

    def _pops(self, number: int) -> list[Any]:
        return [self._pop() for _ in range(number)][::-1]

    def _moved(self, ins: dis.Instruction) -> bool:
        """Run an instruction that only moves values on the stack."""
        number = ins.arg or 0
        match ins.opname:
            case "PUSH_NULL":
                self._stack.append(_NULL)
            case "COPY" | "DUP_TOP":
                self._stack.append(self._stack[-(number or 1)])
            case "SWAP":
                self._stack[-number], self._stack[-1] = self._stack[-1], self._stack[-number]
            case "ROT_TWO" | "ROT_THREE" | "ROT_FOUR" | "ROT_N":
                number = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4}.get(ins.opname, number)
                self._stack.insert(len(self._stack) - number, self._pop())
            case _:
                return False
        return True

    def _read(self, ins: dis.Instruction) -> bool:
        """Run an instruction that pushes a value."""
        name = ins.opname
        if name in _LOADS:
            names = ins.argval if isinstance(ins.argval, tuple) else (ins.argval,)
            self._stack += [self._kept.get(each, each) for each in names]
        elif name == "LOAD_GLOBAL":
            self._push_callable(ins.argval, ins)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            is_hook = ins.argval.startswith(_PROFILERS)
            owner = _text(self._pop())
            self._push_callable(_PROFILER if is_hook else f"{owner}.{ins.argval}", ins)
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_CONST_IMMORTAL"):
            self._stack.append(_constant(ins.argval))
        elif name in ("BUILD_LIST", "BUILD_TUPLE"):
            parts = self._pops(ins.arg or 0)
            self._stack.append(parts if name == "BUILD_LIST" else tuple(parts))
        elif name == "BUILD_MAP":
            parts = [_text(each) for each in self._pops(2 * (ins.arg or 0))]
            pairs = zip(parts[::2], parts[1::2], strict=True)
            self._stack.append(f"{{{', '.join(f'{key}: {value}' for key, value in pairs)}}}")
        elif name == "BUILD_SLICE":
            self._stack.append(slice(*self._pops(ins.arg or 2)))
        elif name == "BINARY_SUBSCR" or ins.argrepr == "[]":
            owner, index = self._pops(2)
            is_known = isinstance(owner, (list, tuple)) and isinstance(index, (int, slice))
            self._stack.append(owner[index] if is_known else f"{_text(owner)}[{_text(index)}]")
        else:
            return False
        return True

    def _push_callable(self, text: str, ins: dis.Instruction) -> None:
        """Push a value, and what makes a call of it where it is about to be called."""
        is_called = "NULL" in ins.argrepr or ins.opname == "LOAD_METHOD"
        order = 1 if sys.version_info >= (3, 13) else -1
        self._stack += [text, _NULL][::order] if is_called else [text]

    def _stored(self, ins: dis.Instruction) -> bool:
        """Run an instruction that stores, drops or returns a value."""
        match ins.opname:
            case "STORE_FAST" | "STORE_NAME" | "STORE_DEREF" | "STORE_GLOBAL":
                name, value = ins.argval, self._pop()
                is_kept = name.startswith("tmp_") and not isinstance(value, _Call)
                if value == _PROFILER or is_kept:
                    self._kept[name] = value
                else:
                    self._emit(f"{name} = {_text(value)}")
            case "STORE_ATTR":
                value, owner = map(_text, self._pops(2))
                self._emit(f"{owner}.{ins.argval} = {value}")
            case "POP_TOP":
                value = self._pop()
                if isinstance(value, _Call):
                    self._emit(value)
            case "RETURN_VALUE":
                self._emit(f"return {_text(self._pop())}")
            case "RETURN_CONST":
                self._emit(f"return {_text(_constant(ins.argval))}")
            case _:
                return False
        return True

    def _edited(self, ins: dis.Instruction) -> bool:
        """Run an instruction that changes a list or what the program has: of the latter a statement tells."""
        match ins.opname:
            case "LIST_EXTEND":
                values, into = self._pop(), self._stack[-(ins.arg or 1)]
                if isinstance(into, list):
                    into += _parts(values)
            case "STORE_SUBSCR":
                value, owner, index = self._pops(3)
                if isinstance(owner, list):
                    owner[index] = value
                else:
                    self._emit(f"{_text(owner)}[{_text(index)}] = {_text(value)}")
            case "DELETE_SUBSCR":
                owner, index = self._pops(2)
                if isinstance(owner, list):
                    del owner[index]
                else:
                    self._emit(f"del {_text(owner)}[{_text(index)}]")
            case _:
                return False
        return True

    def _called(self, ins: dis.Instruction) -> bool:
        """Run an instruction of a call."""
        name, mapping = ins.opname, _NULL
        if name == "KW_NAMES":
            self._keywords = tuple(map(str, self._consts[ins.arg or 0]))
            return True
        if name == "CALL_FUNCTION_EX":
            # From 3.14 on there is always a mapping, or NULL in its place.
            mapping = self._pop() if ins.arg is None or ins.arg & 1 else _NULL
            args = [_text(each) for each in _parts(self._pop())]
            args += [] if mapping is _NULL else [f"**{_text(mapping)}"]
            number = 2 if len(self._stack) > 1 and _NULL in self._stack[-2:] else 1
        elif name in ("CALL", "CALL_KW", "CALL_METHOD", "CALL_FUNCTION", "CALL_FUNCTION_KW"):
            if name.endswith("KW"):
                self._keywords = tuple(each.strip("'") for each in _parts(self._pop()))
            args = [_text(each) for each in self._pops(ins.arg or 0)]
            first = len(args) - len(self._keywords)
            args[first:] = map("{}={}".format, self._keywords, args[first:])
            self._keywords = ()
            number = 1 if name.startswith("CALL_FUNCTION") else 2
        else:
            return False
        # A callable, and maybe what Python puts beside it.
        callee = next((_text(each) for each in self._pops(number) if each is not _NULL), "<?>")
        text = f"{callee}({', '.join(args)})"
        is_value = callee.startswith(CONTINUATION) and not callee.endswith(")")  # makes a function
        self._stack.append(_PROFILER if callee == _PROFILER else text if is_value else _Call(text))
        return True

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
