"""Operators, comparisons and subscripts."""

from __future__ import annotations

import dis

from torchloom.inspect.pseudo.expressions import HOOK, compound, is_plain, primary, slice_of
from torchloom.inspect.pseudo.loads import Loads
from torchloom.inspect.pseudo.subscripts import place_of
from torchloom.inspect.pseudo.values import (
    Display,
    Expression,
    Iterating,
    NameExpression,
    Part,
    reads_of,
)

_IN_PLACE = ("+", "-", "*", "/", "//", "%", "@", "&", "|", "^", ">>", "<<", "**")
OLD_BINARY = {
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
UNARY = {"UNARY_NEGATIVE": "-", "UNARY_POSITIVE": "+", "UNARY_INVERT": "~", "UNARY_NOT": "not "}


class Operators(Loads):
    """Instructions that compute with what is on the stack."""

    def op_BINARY_OP(self, ins: dis.Instruction) -> None:
        self._binary(ins.argrepr)

    def op_OLD_BINARY(self, ins: dis.Instruction) -> None:
        kind, _, word = ins.opname.partition("_")
        self._binary(OLD_BINARY[word] + ("=" if kind == "INPLACE" else ""))

    def op_BINARY_SUBSCR(self, ins: dis.Instruction) -> None:
        self._binary("[]")

    def _binary(self, operator: str) -> None:
        if operator in ("[]", ""):
            key = self.pop()
            self._subscript(self.pop_raw(), key)
            return
        right = self.pop()
        left = self.pop()
        if operator.endswith("=") and operator[:-1] in _IN_PLACE:
            self._in_place(left, operator, right)
        else:
            self.push(compound(f"{left.operand} {operator} {right.operand}", left, right))

    def _in_place(self, left: Part, operator: str, right: Part) -> None:
        """Emit an augmented assignment, which may change an object in place. A variable keeps its value unless the
        result is stored in it."""
        self.settle()
        is_target = isinstance(left, NameExpression) and self.stored_next() == left.text
        target = left if is_target else self.renewed(left)
        self.settle(only=target.text)
        self.emit(f"{target.text} {operator} {right.text}")
        self.push(target)

    def renewed(self, value: Part) -> Part:
        """Emit an assignment to a fresh name, also for a list that has a name."""
        if isinstance(value, Display) and value.name is not None:
            value = NameExpression(value.name, reads=value.reads)
        return self._named(value)

    def op_UNARY(self, ins: dis.Instruction) -> None:
        value = self.pop()
        self.push(compound(f"{UNARY[ins.opname]}{value.operand}", value))

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
        text = f"{left.operand} is{' not' if ins.arg else ''} {right.operand}"
        is_fragile = left.is_fragile or right.is_fragile
        self.push(Expression(text, False, is_fragile, reads_of((left, right))))

    def op_CONTAINS_OP(self, ins: dis.Instruction) -> None:
        left, right = self.pop_many(2)
        word = "not in" if ins.arg else "in"
        self.push(compound(f"{left.operand} {word} {right.operand}", left, right))

    # -- subscripts

    def op_BUILD_SLICE(self, ins: dis.Instruction) -> None:
        self.push(slice_of(self.pop_many(ins.arg or 2)))

    def op_BINARY_SLICE(self, ins: dis.Instruction) -> None:
        key = slice_of(self.pop_many(2))
        self._subscript(self.pop_raw(), key)

    def _subscript(self, owner: Part, key: Part) -> None:
        if isinstance(owner, Display) and self._push_part(owner, place_of(key)):
            return
        owner = self.pinned(owner)
        self.push(primary(f"{owner.operand}[{key.key}]", owner, key))

    def _push_part(self, owner: Display, place: int | slice | None) -> bool:
        """Push an element or a slice of a list whose elements are known; return whether that was possible."""
        if place is None or not owner.is_open:
            return False
        size = len(owner.elements)
        if isinstance(place, int) and not -size <= place < size:
            return False
        self._evaluate(owner)
        # What now stands in two places must be something that may be written twice.
        for index in range(*place.indices(size)) if isinstance(place, slice) else (place,):
            part = owner.elements[index]
            if not isinstance(part, Display) and not is_plain(part):
                owner.elements[index] = self._named(part)
        found = owner.elements[place]
        self.push(Display("list", found) if isinstance(found, list) else found)
        return True

    def _evaluate(self, owner: Display) -> None:
        """Name unevaluated elements of a list: dropped and moved elements are evaluated, too."""
        if owner.is_fragile:
            self.settle()
            self._settle(owner.elements, None)

    def op_STORE_SUBSCR(self, ins: dis.Instruction) -> None:
        key = self.pop()
        owner, value = self.pop_raw(), self.pop_raw()
        self._store_subscript(value, owner, key)

    def op_STORE_SLICE(self, ins: dis.Instruction) -> None:
        key = slice_of(self.pop_many(2))
        owner, value = self.pop_raw(), self.pop_raw()
        self._store_subscript(value, owner, key)

    def _store_subscript(self, value: Part, owner: Part, key: Part) -> None:
        place = place_of(key)
        if isinstance(owner, Display) and owner.is_open and self._is_held(owner):
            size = len(owner.elements)
            if isinstance(place, int) and -size <= place < size:
                self._evaluate(owner)
                owner.elements[place] = self.named(value) if value.is_fragile else value
                return
            is_slice = isinstance(place, slice) and value is not owner
            if is_slice and isinstance(value, Display) and value.is_open:
                self._evaluate(owner)
                self._evaluate(value)
                owner.elements[place] = value.elements
                return
        # Both are written here, and one may hold the other.
        owner, value = self._both_pinned(owner, value)
        self.statement(f"{owner.operand}[{key.key}] = {value.text}")

    def _both_pinned(self, owner: Part, value: Part) -> tuple[Part, Part]:
        self.stack.append(owner)
        value = self.pinned(value)
        return self.pop(), value

    def op_DELETE_SUBSCR(self, ins: dis.Instruction) -> None:
        key = self.pop()
        owner, place = self.pop_raw(), place_of(key)
        if isinstance(owner, Display) and owner.is_open and place is not None:
            size = len(owner.elements)
            if isinstance(place, slice) or -size <= place < size:
                self._evaluate(owner)
                del owner.elements[place]
                return
        owner = self.pinned(owner)
        self.statement(f"del {owner.operand}[{key.key}]")

    def op_GET_LEN(self, ins: dis.Instruction) -> None:
        value = self.once(1)
        self.push(primary(f"len({value.text})", value))

    def op_GET_ITER(self, ins: dis.Instruction) -> None:
        value = self.pop()
        text = f"iter({value.text})"
        self.push(Iterating(text, is_fragile=True, reads=value.reads, iterable=value.text))
