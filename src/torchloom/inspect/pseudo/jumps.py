"""Where jumps of bytecode lead: the targets, the heads of loops, and where a loop ends."""

from __future__ import annotations

import dis
import sys
from types import CodeType

ALWAYS = ("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP")
"""Jumps that are taken whatever is on the stack."""
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_SPLITS = ("FOR_ITER", "SEND")
_WRITES = ("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL", "DELETE_FAST", "DELETE_DEREF")


class Jumps:
    """The instructions of one code object, by index, and how they follow each other."""

    def __init__(self, code: CodeType) -> None:
        shown = [ins for ins in dis.get_instructions(code) if ins.opname != "CACHE"]
        self.instructions = shown
        self._at = {ins.offset: index for index, ins in enumerate(shown)}
        self.heads = self._loop_heads()
        """Indices at which loops begin."""

    def target(self, ins: dis.Instruction) -> int:
        """Return the index to which a jump leads."""
        return self._at.get(ins.argval, len(self.instructions))

    def stored_in(self, head: int) -> frozenset[str]:
        """Return the variables that a loop stores."""
        last = max(
            (index for index, ins in enumerate(self.instructions) if self._jumps_to(ins, head)),
            default=head,
        )
        found: set[str] = set()
        for ins in self.instructions[head : last + 1]:
            if ins.opname.startswith(_WRITES):
                found |= {str(each) for each in _names(ins)}
        return frozenset(found)

    def exit_of(self, ins: dis.Instruction) -> int:
        """Return where a loop over an iterator goes on when it has run out.

        Args:
            ins: its `FOR_ITER`.
        """
        index = self.target(ins)
        # 3.12 and later pop the iterator in instructions of their own.
        while index < len(self.instructions) and self.instructions[index].opname in (
            "END_FOR",
            "POP_ITER",
        ):
            index += 1
        previous = self.instructions[index - 1].opname if index else ""
        return index + 1 if previous == "END_FOR" and self._pops_iterator(index) else index

    def _pops_iterator(self, index: int) -> bool:
        """Say whether 3.13's `POP_TOP` after `END_FOR` stands at `index`."""
        return (
            sys.version_info[:2] == (3, 13)
            and index < len(self.instructions)
            and self.instructions[index].opname == "POP_TOP"
        )

    def _jumps_to(self, ins: dis.Instruction, index: int) -> bool:
        return "JUMP" in ins.opname and self._at.get(ins.argval) == index

    def _loop_heads(self) -> frozenset[int]:
        heads = set()
        for index in self._reached():
            ins = self.instructions[index]
            if "JUMP" in ins.opname and isinstance(ins.argval, int):
                target = self._at.get(ins.argval)
                if target is None or target > index:
                    continue
                if self.instructions[target].opname != "SEND":
                    heads.add(target)
        return frozenset(heads)

    def _reached(self) -> set[int]:
        """Return the instructions that run without an exception: handlers jump back, too."""
        found: set[int] = set()
        todo = [0]
        while todo:
            index = todo.pop()
            if index in found or index >= len(self.instructions):
                continue
            found.add(index)
            ins = self.instructions[index]
            if ins.opname in (*_ENDS, *ALWAYS) or ins.opname.startswith("JUMP_BACKWARD"):
                following = []
            else:
                following = [index + 1]
            if ("JUMP" in ins.opname or ins.opname in _SPLITS) and isinstance(ins.argval, int):
                following.append(self.target(ins))
            todo += following
        return found


def _names(ins: dis.Instruction) -> tuple[object, ...]:
    """Return the variables of an instruction that may stand for two."""
    if isinstance(ins.argval, tuple):
        return ins.argval
    return tuple(each.strip() for each in str(ins.argval).split(","))
