"""Control flow: the blocks of a function, expanded into a tree of indented lines.

Code that Dynamo writes has no loops of its own, and each branch ends in a return. Expanding both
sides of every branch therefore needs no structuring and prints what each path does. Loops of
bytecode that a user wrote are printed as `for` and `while True`; exception handlers are left out
and said to be.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType

from torchloom.inspect.pseudo.constants import without_values
from torchloom.inspect.pseudo.machine import Machine, bookkeeping, constant_text
from torchloom.inspect.pseudo.values import HOOK, Part, Value, name, primary

_MAX_LINES = 2000
_MAX_DEPTH = 60
_INDENT = "    "


def pseudo_source(
    code: CodeType, title: str | None = None, *, original: CodeType | None = None
) -> str:
    """Return readable pseudo-source of a code object; never raises, and shows no objects.

    Args:
        code: any bytecode, as compiled or as rewritten by Dynamo.
        title: what to call the function; default: the code's own name.
        original: what Dynamo rewrote. Strings that it lacks are values of the program: not shown.

    Example:
        >>> print(pseudo_source((lambda x: x + 1).__code__, "f"))
        def f(x):
            return x + 1
    """
    try:
        code = without_values(code, original)
        return _Printer(code).text(title or code.co_name)
    except Exception as error:  # noqa: BLE001
        return _listed(code, original, error)


def bytecode_listing(code: CodeType, original: CodeType | None = None) -> str:
    """Return the instructions of a code object, one per line; constants as in `pseudo_source`."""
    return dis.Bytecode(without_values(code, original)).dis()


def _listed(code: CodeType, original: CodeType | None, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}"
    try:
        listing = bytecode_listing(code, original)
    except Exception:  # noqa: BLE001  nothing is left to show
        return f"# not readable ({reason})"
    return f"# not readable as source ({reason}); bytecode:\n{listing}"


@dataclass
class _Block:
    """Where printing stands on one path."""

    index: int
    machine: Machine
    depth: int
    loops: tuple[int, ...] = ()
    """Indices of the loop heads around this path."""


@dataclass
class _Printer:
    code: CodeType
    lines: list[str] = field(default_factory=list)
    num_fresh: int = 0

    def __post_init__(self) -> None:
        shown = [ins for ins in dis.get_instructions(self.code) if ins.opname != "CACHE"]
        self.instructions = shown
        self.at = {ins.offset: index for index, ins in enumerate(shown)}
        self.heads = self._loop_heads()

    def text(self, title: str) -> str:
        self.lines = [f"def {title}({', '.join(_parameters(self.code))}):"]
        self._path(_Block(0, self._machine(1, []), 1))
        if len(self.lines) == 1:
            self.lines.append(f"{_INDENT}pass")
        if getattr(self.code, "co_exceptiontable", b"") or self._has_old_handlers():
            self.lines.append(f"{_INDENT}# exception handlers are not shown")
        return "\n".join(self.lines)

    def _machine(self, depth: int, stack: list[Part]) -> Machine:
        kept = bookkeeping(self.instructions)
        return Machine(stack, self._emitter(depth), self._fresh, self.code.co_consts, kept=kept)

    def _emitter(self, depth: int) -> Callable[[str], None]:
        def emit(line: str) -> None:
            if len(self.lines) < _MAX_LINES:
                self.lines.append(_INDENT * depth + line)

        return emit

    def _fresh(self) -> str:
        self.num_fresh += 1
        return f"t{self.num_fresh}"

    def _path(self, block: _Block) -> None:
        """Print everything that runs from a block to the end of its path."""
        machine, index = block.machine, block.index
        if block.depth > _MAX_DEPTH:
            machine.emit("...  # nested too deeply to show")
            return
        while 0 <= index < len(self.instructions):
            if len(self.lines) >= _MAX_LINES:
                return
            ins = self.instructions[index]
            if index in self.heads and index not in block.loops and ins.opname != "FOR_ITER":
                machine.settle()
                machine.emit("while True:")
                inner = machine.fork(self._emitter(block.depth + 1))
                self._path(_Block(index, inner, block.depth + 1, (*block.loops, index)))
                return
            kind = ins.opname
            if kind in ("RETURN_VALUE", "RETURN_CONST"):
                value = constant_text(ins.argval) if kind == "RETURN_CONST" else machine.pop().text
                machine.emit(f"return {value}")
                return
            if kind in ("RAISE_VARARGS", "RERAISE"):
                raised = machine.pop_many(ins.arg or 0) if kind == "RAISE_VARARGS" else []
                machine.emit(f"raise {' from '.join(value.text for value in raised)}".rstrip())
                return
            if kind == "FOR_ITER":
                index = self._for(ins, index, block)
                continue
            if kind == "SEND":  # the loop that delegates to another generator
                machine.pop()
                machine.push(primary(f"(yield from {machine.pop().text})"))
                index = self.at.get(ins.argval, len(self.instructions))
                continue
            if "JUMP" in kind:
                following = self._jump(ins, index, block)
                if following is None:
                    return
                index = following
                continue
            machine.step(ins)
            index += 1

    def _for(self, ins: dis.Instruction, index: int, block: _Block) -> int:
        """Print a loop over an iterator and return where its exit goes on."""
        machine = block.machine
        iterator = machine.pop()
        machine.settle()
        each = machine.fresh()
        machine.emit(f"for {each} in {iterator.text}:")
        inner = machine.fork(self._emitter(block.depth + 1))
        inner.stack += [Value("<iterator>"), name(each)]
        before = len(self.lines)
        self._path(_Block(index + 1, inner, block.depth + 1, (*block.loops, index)))
        if len(self.lines) == before:
            self._emitter(block.depth + 1)("pass")
        exit_index = self.at.get(ins.argval, len(self.instructions))
        # 3.12 and later pop the iterator in instructions of their own.
        while exit_index < len(self.instructions) and self.instructions[exit_index].opname in (
            "END_FOR",
            "POP_ITER",
        ):
            exit_index += 1
        previous = self.instructions[exit_index - 1].opname if exit_index else ""
        if previous == "END_FOR" and self._pops_iterator(exit_index):
            exit_index += 1
        return exit_index

    def _pops_iterator(self, index: int) -> bool:
        """Say whether 3.13's `POP_TOP` after `END_FOR` stands at `index`."""
        return (
            sys.version_info[:2] == (3, 13)
            and index < len(self.instructions)
            and self.instructions[index].opname == "POP_TOP"
        )

    def _jump(self, ins: dis.Instruction, index: int, block: _Block) -> int | None:  # noqa: PLR0911
        """Follow a jump; None when the path has ended in it."""
        machine, kind = block.machine, ins.opname
        target = self.at.get(ins.argval, len(self.instructions))
        if kind in ("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP") or kind.startswith("JUMP_BACKWARD"):
            if target in block.loops:
                machine.settle()
                machine.emit("continue")
                return None
            if target <= index:
                machine.emit("...  # jumps back")
                return None
            return target
        if (
            machine.stack and machine.stack[-1] is HOOK
        ):  # both ways are the same but for bookkeeping
            machine.pop_raw()
            return index + 1
        condition = self._condition(ins, machine)
        if condition is None:
            machine.emit(f"# {kind} {ins.argrepr}")
            return index + 1
        jumps_if, keeps = condition
        machine.settle()
        # What runs when the jump is not taken comes first, under the negated condition.
        machine.emit(f"if {_negated(jumps_if.text)}:")
        inner = machine.fork(self._emitter(block.depth + 1))
        before = len(self.lines)
        self._path(_Block(index + 1, inner, block.depth + 1, block.loops))
        if len(self.lines) == before:
            inner.emit("pass")
        if keeps is not None:
            machine.push(keeps)
        if target in block.loops:
            machine.emit("continue")
            return None
        if target <= index:
            machine.emit("...  # jumps back")
            return None
        return target

    def _condition(
        self, ins: dis.Instruction, machine: Machine
    ) -> tuple[Value, Part | None] | None:
        """Return when a conditional jump is taken, and what it leaves on the stack if so."""
        kind = ins.opname
        if kind.endswith("_OR_POP"):  # keeps the value where it jumps
            value = machine.pop()
            if not value.is_atom or value.is_fragile:
                value = machine.named(value)
            text = value.operand if "TRUE" in kind else f"not {value.operand}"
            return primary(text, value), value
        value_text = machine.stack[-1].operand if machine.stack else "<?>"
        for ending, text in (
            ("IF_NOT_NONE", f"{value_text} is not None"),
            ("IF_NONE", f"{value_text} is None"),
            ("IF_TRUE", value_text),
            ("IF_FALSE", f"not {value_text}"),
            ("IF_NOT_EXC_MATCH", f"not matches({value_text})"),
        ):
            if kind.endswith(ending):
                value = machine.pop()
                return primary(text, value), None
        return None

    def _loop_heads(self) -> frozenset[int]:
        heads = set()
        for index, ins in enumerate(self.instructions):
            if "JUMP" in ins.opname and isinstance(ins.argval, int):
                target = self.at.get(ins.argval)
                if target is None or target > index:
                    continue
                if self.instructions[target].opname != "SEND":
                    heads.add(target)
        return frozenset(heads)

    def _has_old_handlers(self) -> bool:
        return any(ins.opname in ("SETUP_FINALLY", "SETUP_WITH") for ins in self.instructions)


def _parameters(code: CodeType) -> list[str]:
    count = code.co_argcount
    names = list(code.co_varnames)
    shown = names[:count]
    after = count + code.co_kwonlyargcount
    if code.co_flags & 0x04:
        shown.append(f"*{names[after]}")
    elif code.co_kwonlyargcount:
        shown.append("*")
    shown += names[count:after]
    if code.co_flags & 0x08:
        shown.append(f"**{names[after + bool(code.co_flags & 0x04)]}")
    return shown


def _negated(text: str) -> str:
    """Return the opposite of a condition, without piling up `not`."""
    if text.startswith("not "):
        inner = text[4:]
        return inner[1:-1] if _is_wrapped(inner) else inner
    for old, new in ((" is not None", " is None"), (" is None", " is not None")):
        if text.endswith(old) and not re.search(r" (and|or) ", text):
            return text.removesuffix(old) + new
    return f"not {text}"


def _is_wrapped(text: str) -> bool:
    """Say whether one pair of parentheses encloses all of `text`."""
    if not (text.startswith("(") and text.endswith(")")):
        return False
    depth = 0
    for position, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0 and position < len(text) - 1:
            return False
    return True
