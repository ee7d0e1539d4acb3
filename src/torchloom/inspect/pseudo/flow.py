"""Control flow: the blocks of a function, expanded into a tree of indented lines.

Code that Dynamo writes has no loops of its own, and each branch ends in a return. Expanding both
sides of every branch therefore needs no structuring and prints what each path does. Loops of
bytecode that a user wrote are printed as `for` and `while True`; exception handlers are left out
and said to be.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType

from torchloom.inspect.pseudo.expressions import HOOK, compound, name
from torchloom.inspect.pseudo.functions import Signature, parameters
from torchloom.inspect.pseudo.jumps import ALWAYS, Jumps
from torchloom.inspect.pseudo.literals import constant_text
from torchloom.inspect.pseudo.machine import Machine, bookkeeping
from torchloom.inspect.pseudo.names import Scope
from torchloom.inspect.pseudo.values import Expression, Iterating, Part

MAX_LINES = 2000
_MAX_DEPTH = 60
_INDENT = "    "
_HANDLERS = ("PUSH_EXC_INFO", "SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH")
_GENERATOR, _ASYNC_GENERATOR = 0x20, 0x200


@dataclass
class _Block:
    """The position of the printer on one path."""

    index: int
    machine: Machine
    depth: int
    loops: tuple[int, ...] = ()
    """Indices of the loop heads around this path."""


@dataclass
class Flow:
    """Prints one function."""

    code: CodeType
    scope: Scope
    clean: Callable[[CodeType], CodeType]
    """Removes the values of the program from a nested function."""
    renamed: dict[str, str] = field(default_factory=dict)
    signature: Signature = field(default_factory=Signature)
    lines: list[str] = field(default_factory=list)
    leaves: list[list[tuple[int, int]]] = field(default_factory=list)
    """For each enclosing loop: the lines that leave it, and the outer loop that each continues with."""

    def __post_init__(self) -> None:
        self.jumps = Jumps(self.code)
        self.instructions = self.jumps.instructions

    def text(self) -> tuple[list[str], list[str]]:
        """Return the parameters and the lines of the body."""
        for title in self.code.co_varnames:
            if not title.isidentifier():  # `.0`: what a comprehension goes over
                self.renamed[title] = self.scope.fresh("iterator")
        head = parameters(self.code, self.signature)
        head = [self.renamed.get(each, each) for each in head]
        self._declare()
        self._path(_Block(0, self._machine(1), 1))
        if self.code.co_flags & (_GENERATOR | _ASYNC_GENERATOR) and not self.scope.has_yield:
            self.lines.insert(0, f"{_INDENT}if False: yield")
        if not self.lines:
            self.lines.append(f"{_INDENT}pass")
        if any(ins.opname in _HANDLERS for ins in self.instructions):
            self.lines.append(f"{_INDENT}# exception handlers are not shown")
        return head, self.lines

    def _declare(self) -> None:
        names = [self.renamed.get(each, each) for each in self.scope.declared_nonlocals()]
        for word, found in (
            ("global", self.scope.declared_globals()),
            ("nonlocal", [each for each in names if each.isidentifier()]),
        ):
            if found:
                self.lines.append(f"{_INDENT}{word} {', '.join(found)}")
        stored = {ins.argval for ins in self.instructions if ins.opname.startswith("STORE_")}
        for each in self.code.co_cellvars:
            if each not in stored and each not in self.code.co_varnames:
                self.lines.append(f"{_INDENT}if False: {each} = None  # has no value here")

    def _machine(self, depth: int) -> Machine:
        return Machine(
            [],
            self._emitter(depth),
            self.scope,
            self._nested,
            self.code.co_consts,
            self.instructions,
            renamed=dict(self.renamed),
            celled=frozenset(self.code.co_freevars),
            kept=bookkeeping(self.instructions),
        )

    def _nested(
        self, code: CodeType, renamed: dict[str, str], signature: Signature, is_class: bool = False
    ) -> tuple[list[str], list[str]]:
        """Return the parameters and the lines of a nested function, or the lines of a class."""
        around = self.scope.around | (frozenset() if self.scope.is_class else self.scope.variables)
        shown = self.clean(code)
        scope = Scope(shown, self.scope.used, around, is_class=is_class)
        flow = Flow(shown, scope, self.clean, renamed, signature)
        if is_class:
            return [], flow.class_lines()
        return flow.text()

    def class_lines(self) -> list[str]:
        """Return the lines of the body of a class, without what Python adds by itself."""
        if any("JUMP" in ins.opname or ins.opname == "FOR_ITER" for ins in self.instructions):
            return [f"{_INDENT}...  # the body of a class with branches is not shown"]
        _, lines = self.text()
        own = ("__module__ = ", "__qualname__ = ", "__classcell__ = ", "return ", "del __class")
        own += ("__firstlineno__ = ", "__static_attributes__ = ", "__classdictcell__ = ")
        return [
            line for line in lines if not line.startswith(tuple(_INDENT + each for each in own))
        ]

    def _emitter(self, depth: int) -> Callable[[str], None]:
        def emit(line: str) -> None:
            if len(self.lines) <= MAX_LINES:
                self.lines.append(_INDENT * depth + line)

        return emit

    # -- paths

    def _path(self, block: _Block) -> None:
        """Print everything that runs from a block to the end of its path."""
        machine, index = block.machine, block.index
        beginning = index if index in block.loops else -1  # the body of a loop begins at its head
        if block.depth > _MAX_DEPTH:
            machine.emit("...  # nested too deeply to show")
            return
        while 0 <= index < len(self.instructions):
            if len(self.lines) > MAX_LINES:
                return
            ins = self.instructions[index]
            machine.at = index
            if index in self.jumps.heads and index != beginning:
                if index in block.loops:
                    self._again(index, block)
                    return
                if ins.opname != "FOR_ITER":
                    self._while(index, block)
                    return
            beginning = -1
            following = self._control(ins, index, block)
            if following is None:
                return
            if following == index:
                machine.step(ins)
                following += 1
            index = following

    def _control(self, ins: dis.Instruction, index: int, block: _Block) -> int | None:
        """Print an instruction that ends or splits a path; return the next index, `index` for any other instruction."""
        machine, kind = block.machine, ins.opname
        if kind in ("RETURN_VALUE", "RETURN_CONST"):
            value = constant_text(ins.argval) if kind == "RETURN_CONST" else machine.pop().text
            is_bare = self.code.co_flags & _ASYNC_GENERATOR
            machine.emit("return" if is_bare else f"return {value}")
            return None
        if kind in ("RAISE_VARARGS", "RERAISE"):
            raised = machine.pop_many(ins.arg or 0) if kind == "RAISE_VARARGS" else []
            machine.emit(f"raise {' from '.join(value.text for value in raised)}".rstrip())
            return None
        if kind == "FOR_ITER":
            return self._for(ins, index, block)
        if kind == "SEND":  # the loop that delegates to another generator
            machine.op_YIELD_FROM(ins)
            return self.jumps.target(ins)
        if "JUMP" in kind:
            return self._jump(ins, index, block)
        return index

    # -- loops

    def _while(self, index: int, block: _Block) -> None:
        machine = block.machine
        machine.enter_loop(self.jumps.stored_in(index))
        machine.emit("while True:")
        inner = machine.fork(self._emitter(block.depth + 1), in_loop=True)
        for target in self._body(_Block(index, inner, block.depth + 1, (*block.loops, index))):
            target(block)

    def _for(self, ins: dis.Instruction, index: int, block: _Block) -> int | None:
        """Print a loop over an iterator; return the index that follows it, or None."""
        machine = block.machine
        iterator = machine.pop()
        machine.enter_loop(self.jumps.stored_in(index))
        each = self.scope.fresh()
        iterable = iterator.iterable if isinstance(iterator, Iterating) else iterator.text
        machine.emit(f"for {each} in {iterable}:")
        inner = machine.fork(self._emitter(block.depth + 1), in_loop=True)
        inner.stack += [Expression("<iterator>"), name(each)]
        before = len(self.lines)
        # The head is in the loop, but the path begins behind it.
        after = self._body(_Block(index + 1, inner, block.depth + 1, (*block.loops, index)))
        if len(self.lines) == before:
            self._emitter(block.depth + 1)("pass")
        if not after:
            return self.jumps.exit_of(ins)
        # Left early for a loop outside: what follows a loop that ran out is not for that path.
        machine.emit("else:")
        rest = machine.fork(self._emitter(block.depth + 1))
        self._path(_Block(self.jumps.exit_of(ins), rest, block.depth + 1, block.loops))
        for target in after:
            target(block)
        return None

    def _body(self, block: _Block) -> list[Callable[[_Block], None]]:
        """Print the body of a loop; return printers of what follows where it is left for an outer loop."""
        self.leaves.append([])
        self._path(block)
        left = self.leaves.pop()
        targets = list(dict.fromkeys(target for _, target in left))
        if len(targets) < 2:
            return [lambda around, to=each: self._again(to, around) for each in targets]
        which = self.scope.fresh()
        for line, target in sorted(left, reverse=True):
            indent = self.lines[line].partition("break")[0]
            self.lines.insert(line, f"{indent}{which} = {targets.index(target)}")

        def choose(around: _Block) -> None:
            for number, target in enumerate(targets):
                around.machine.emit(f"if {which} == {number}:")
                inner = around.machine.fork(self._emitter(around.depth + 1))
                self._again(target, _Block(target, inner, around.depth + 1, around.loops))

        return [choose]

    def _again(self, head: int, block: _Block) -> None:
        """Continue with the next iteration of the innermost loop, or of one around it."""
        block.machine.settle()
        if head == block.loops[-1]:
            block.machine.emit("continue")
            return
        block.machine.emit("break")
        self.leaves[-1].append((len(self.lines) - 1, head))

    # -- branches

    def _jump(self, ins: dis.Instruction, index: int, block: _Block) -> int | None:
        """Follow a jump; return the next index, or None if the path has ended."""
        machine, kind = block.machine, ins.opname
        if kind in ALWAYS or kind.startswith("JUMP_BACKWARD"):
            return self.jumps.target(ins)
        if machine.stack and machine.stack[-1] is HOOK:
            machine.pop_raw()  # both ways are the same but for bookkeeping
            return index + 1
        condition = self._condition(ins, machine)
        if condition is None:
            machine.emit(f"# {kind} {ins.argrepr}")
            return index + 1
        goes_on, keeps = condition
        machine.settle()
        # What runs when the jump is not taken comes first.
        machine.emit(f"if {goes_on.text}:")
        inner = machine.fork(self._emitter(block.depth + 1))
        before = len(self.lines)
        self._path(_Block(index + 1, inner, block.depth + 1, block.loops))
        if len(self.lines) == before:
            inner.emit("pass")
        if keeps is not None:
            machine.push(keeps)
        return self.jumps.target(ins)

    def _condition(self, ins: dis.Instruction, machine: Machine) -> tuple[Part, Part | None] | None:
        """Return the condition under which a jump is not taken, and the value that it keeps on the stack if taken."""
        kind = ins.opname
        if kind.endswith("_OR_POP"):  # keeps the value where it jumps
            value = machine.once(1) if machine.stack else Expression("<?>")
            machine.pop_raw()
            return (_not(value) if "TRUE" in kind else value), value
        for ending, negated in (
            ("IF_NOT_NONE", " is None"),
            ("IF_NONE", " is not None"),
            ("IF_TRUE", ""),
            ("IF_FALSE", ""),
        ):
            if kind.endswith(ending):
                value = machine.pop()
                if negated:
                    return compound(f"{value.operand}{negated}", value), None
                return (_not(value) if ending == "IF_TRUE" else value), None
        if kind.endswith("IF_NOT_EXC_MATCH"):
            return Expression(f"<matches {machine.pop().text}>"), None
        return None


def _not(value: Part) -> Expression:
    return compound(f"not {value.operand}", value)
