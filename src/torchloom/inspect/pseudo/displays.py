"""Tuples, lists, sets and dicts, whole or bit by bit, and taking them apart."""

from __future__ import annotations

import dis
import keyword

from torchloom.inspect.pseudo.expressions import name, pair_of, primary, spread, tuple_of
from torchloom.inspect.pseudo.operators import Operators
from torchloom.inspect.pseudo.values import Constant, Display, Pair, Part, Tuple


class Displays(Operators):
    """Instructions that build containers."""

    def op_BUILD_TUPLE(self, ins: dis.Instruction) -> None:
        self.push(tuple_of(self.pop_many(ins.arg or 0)))

    def op_BUILD_LIST(self, ins: dis.Instruction) -> None:
        self.push(Display("list", [self.pop_raw() for _ in range(ins.arg or 0)][::-1]))

    def op_BUILD_SET(self, ins: dis.Instruction) -> None:
        self.push(Display("set", self.pop_many(ins.arg or 0)))

    def op_BUILD_MAP(self, ins: dis.Instruction) -> None:
        flat = self.pop_many(2 * (ins.arg or 0))
        pairs = zip(flat[::2], flat[1::2], strict=True)
        self.push(Display("dict", [pair_of(key, value) for key, value in pairs]))

    def op_BUILD_CONST_KEY_MAP(self, ins: dis.Instruction) -> None:
        keys = self.pop()
        values = self.pop_many(ins.arg or 0)
        names = keys.items or ()
        if len(names) != len(values):
            names = tuple(name(f"<key {index}>") for index in range(len(values)))
        pairs = zip(names, values, strict=True)
        self.push(Display("dict", [pair_of(key, value) for key, value in pairs]))

    # -- adding to what was begun

    def _target(self, depth: int) -> Part | None:
        return self.stack[-depth] if len(self.stack) >= depth else None

    def op_LIST_EXTEND(self, ins: dis.Instruction) -> None:
        self._extend(ins.arg or 1, self.pop(), "extend")

    def op_SET_UPDATE(self, ins: dis.Instruction) -> None:
        self._extend(ins.arg or 1, self.pop(), "update")

    def _extend(self, depth: int, added: Part, method: str) -> None:
        target = self._target(depth)
        if isinstance(target, Display) and target.name is None:
            parts = added.items if added.items is not None else (spread("*", added),)
            self._add(target, list(parts), depth)
        else:
            self._emit_on(target, f".{method}({added.text})")

    def op_DICT_UPDATE(self, ins: dis.Instruction) -> None:
        self._update(ins.arg or 1, self.pop())

    def op_DICT_MERGE(self, ins: dis.Instruction) -> None:
        self._update(ins.arg or 1, self.pop())

    def _update(self, depth: int, added: Part) -> None:
        target = self._target(depth)
        if isinstance(target, Display) and target.name is None:
            parts: list[Part] = [spread("**", added)]
            if isinstance(added, Display) and added.name is None and not target.elements:
                parts = added.elements
            self._add(target, parts, depth)
        else:
            self._emit_on(target, f".update({added.text})")

    def op_LIST_APPEND(self, ins: dis.Instruction) -> None:
        self._append(ins.arg or 1, self.pop(), "append")

    def op_SET_ADD(self, ins: dis.Instruction) -> None:
        self._append(ins.arg or 1, self.pop(), "add")

    def _append(self, depth: int, item: Part, method: str) -> None:
        target = self._target(depth)
        if isinstance(target, Display) and target.name is None:
            self._add(target, [item], depth)
        else:
            self._emit_on(target, f".{method}({item.text})")

    def op_MAP_ADD(self, ins: dis.Instruction) -> None:
        key, value = self.pop_many(2)
        target = self._target(ins.arg or 1)
        if isinstance(target, Display) and target.name is None:
            self._add(target, [pair_of(key, value)], ins.arg or 1)
            return
        if key.is_fragile:  # the assignment evaluates the value first
            key = self.named(key)
        self._emit_on(target, f"[{key.text}] = {value.text}")

    def _add(self, target: Display, parts: list[Part], depth: int) -> None:
        between = self.stack[len(self.stack) - depth + 1 :]
        if any(part.is_fragile for part in between) and any(part.is_fragile for part in parts):
            self.settle()
            parts = [self._named(part) if part.is_fragile else part for part in parts]
        target.elements += parts

    def _emit_on(self, target: Part | None, text: str) -> None:
        self.statement(f"{'<?>' if target is None else target.owner}{text}")

    # -- tuples of lists, and taking apart

    def op_LIST_TO_TUPLE(self, ins: dis.Instruction) -> None:
        value = self.pop()
        items = value.items
        self.push(tuple_of([spread("*", value)] if items is None else items))

    def op_UNPACK_SEQUENCE(self, ins: dis.Instruction) -> None:
        self._unpack(self.pop(), [self.scope.fresh() for _ in range(ins.arg or 0)])

    def op_UNPACK_EX(self, ins: dis.Instruction) -> None:
        value, arg = self.pop(), ins.arg or 0
        count = (arg & 255) + 1 + (arg >> 8)
        self._unpack(value, [self.scope.fresh() for _ in range(count)], starred=arg & 255)

    def _unpack(self, value: Part, names: list[str], starred: int | None = None) -> None:
        written = [f"*{each}" if i == starred else each for i, each in enumerate(names)]
        target = ", ".join(written) + ("," if len(written) == 1 else "")
        self.statement(f"{target or '[]'} = {value.text}")
        for each in reversed(names):
            self.push(name(each))


def arguments_of(value: Part) -> list[Part]:
    """Return the positional arguments that a tuple or list stands for in `f(*value)`."""
    is_ordered = isinstance(value, (Tuple, Display)) or type(getattr(value, "value", None)) is tuple
    if is_ordered and value.items is not None:
        return list(value.items)
    return [spread("*", value)]


def keywords_of(value: Part) -> list[Part]:
    """Return the keyword arguments that a dict stands for in `f(**value)`."""
    if not isinstance(value, Display) or value.name is not None or value.kind != "dict":
        return [spread("**", value)]
    names = [_keyword(each) for each in value.elements]
    known = [each for each in names if each]
    if len(set(known)) != len(known):  # Python refuses to read it; the call itself raises, too
        return [spread("**", value)]
    found: list[Part] = []
    for word, part in zip(names, value.elements, strict=True):
        if not isinstance(part, Pair):
            found.append(part)
        elif word:
            found.append(primary(f"{word}={part.of[1].text}", part.of[1]))
        else:
            found.append(primary(f"**{{{part.text}}}", part))
    return found


def _keyword(part: Part) -> str:
    key = part.of[0] if isinstance(part, Pair) else None
    word = key.value if isinstance(key, Constant) else None
    if isinstance(word, str) and word.isidentifier() and not keyword.iskeyword(word):
        return word
    return ""
