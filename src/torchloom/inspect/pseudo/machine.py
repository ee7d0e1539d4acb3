"""Runs one instruction at a time on a symbolic stack and emits statements as lines.

A method `op_NAME` handles the opcode NAME; the base classes of `Machine` define them by topic. `_ALIASES` maps
opcodes that have other names in some Python versions. `flow` handles jumps.
"""

from __future__ import annotations

import dis
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchloom.inspect.pseudo.functions import Functions
from torchloom.inspect.pseudo.loads import HOOKS
from torchloom.inspect.pseudo.operators import OLD_BINARY, UNARY
from torchloom.inspect.pseudo.values import Expression

_IGNORED = frozenset(
    [
        "NOP",
        "RESUME",
        "CACHE",
        "PRECALL",
        "EXTENDED_ARG",
        "COPY_FREE_VARS",
        "GEN_START",
        "TO_BOOL",
        "NOT_TAKEN",
        "POP_BLOCK",
        "SETUP_FINALLY",
        "POP_EXCEPT",
        "END_SEND",
        "END_FOR",  # the printer has popped the iterator already
        "GET_YIELD_FROM_ITER",
        "GET_AWAITABLE",
        "ASYNC_GEN_WRAP",
    ]
)
_ASKS = "_is_profiler_enabled"
"""From torch 2.15 on, Dynamo calls the hooks under a condition, with locals for it, the module and the result."""


@dataclass
class Machine(Functions):
    """Runs instructions that are no jumps."""

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
            self.push(Expression(f"<{ins.opname}>"))


def bookkeeping(instructions: Sequence[dis.Instruction]) -> frozenset[str]:
    """Return the locals that serve Dynamo's hooks alone: the condition, the module, the result (2.15)."""
    found = set()
    for before, ins in pairwise(instructions):
        is_call = str(ins.argval).startswith(HOOKS) and before.opname.startswith("LOAD_FAST")
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


_ALIASES = {
    **dict.fromkeys(UNARY, "UNARY"),
    **{f"{kind}_{word}": "OLD_BINARY" for kind in ("BINARY", "INPLACE") for word in OLD_BINARY},
    **dict.fromkeys(("ROT_TWO", "ROT_THREE", "ROT_FOUR"), "ROT_N"),
    **dict.fromkeys(("LOAD_FAST_CHECK", "LOAD_FAST_BORROW"), "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": "LOAD_FAST_LOAD_FAST",
    "LOAD_CLASSDEREF": "LOAD_DEREF",
    **dict.fromkeys(("STORE_DEREF", "STORE_NAME"), "STORE_FAST"),
    **dict.fromkeys(("DELETE_DEREF", "DELETE_NAME"), "DELETE_FAST"),
    "SETUP_WITH": "BEFORE_WITH",
}
