"""Nested functions, printed where they are made."""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import CodeType

from torchloom.inspect.pseudo.calls import Calls
from torchloom.inspect.pseudo.expressions import BUILD_CLASS, name, primary
from torchloom.inspect.pseudo.stack import code_of
from torchloom.inspect.pseudo.values import (
    Cell,
    ClassBody,
    Constant,
    Display,
    Expression,
    Made,
    Pair,
    Part,
    reads_of,
)

_DEFAULTS, _KW_DEFAULTS, _ANNOTATIONS, _CLOSURE = 1, 2, 4, 8
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL")


@dataclass
class Signature:
    """Defaults and annotations, which a function's code does not have."""

    defaults: tuple[str, ...] = ()
    """Of the last positional parameters."""
    kw_defaults: dict[str, str] | None = None
    annotations: dict[str, str] | None = None

    def of(self, parameter: str, default: str | None) -> str:
        """Return a parameter as it is written."""
        annotation = (self.annotations or {}).get(parameter.lstrip("*"))
        if annotation is None:
            return parameter if default is None else f"{parameter}={default}"
        ending = "" if default is None else f" = {default}"
        return f"{parameter}: {annotation}{ending}"


class Functions(Calls):
    """Instructions that make functions."""

    def op_MAKE_FUNCTION(self, ins: dis.Instruction) -> None:
        if sys.version_info < (3, 11):
            self.pop()  # the qualified name
        made = Made("<function>", code=code_of(code := self.pop()))
        if made.code is None:
            self.push(primary(f"<function>({code.text})", code))
            return
        if sys.version_info < (3, 13):
            for flag in (_CLOSURE, _ANNOTATIONS, _KW_DEFAULTS, _DEFAULTS):
                if (ins.arg or 0) & flag:
                    made = replace(made, parts=(*made.parts, (flag, self.pop())))
        self._define_unless_more_follows(made)

    def op_SET_FUNCTION_ATTRIBUTE(self, ins: dis.Instruction) -> None:
        made = self.pop_raw()
        part = self.pop()
        if isinstance(made, Made):
            made = replace(made, parts=(*made.parts, (ins.arg or 0, part)))
            self._define_unless_more_follows(made)
        else:
            self.push(made)

    def op_SETUP_ANNOTATIONS(self, ins: dis.Instruction) -> None:
        self.emit("__annotations__ = {}")

    def _define_unless_more_follows(self, made: Made) -> None:
        following = self.instructions[self.at + 1 : self.at + 2]
        if following and following[0].opname == "SET_FUNCTION_ATTRIBUTE":
            self.push(made)
        elif made.code is not None:
            self._define(made, made.code)

    def _define(self, made: Made, code: CodeType) -> None:
        parts = dict(made.parts)
        renamed = self._free_names(code, parts.get(_CLOSURE))
        if any(each is BUILD_CLASS for each in self.stack[-2:]):
            _, lines = self.nested(code, renamed, Signature(), is_class=True)
            self.push(ClassBody("<class body>", lines=tuple(lines)))
            return
        signature, unread = self._signature(parts)
        read = [part for flag, part in made.parts if flag != _CLOSURE]
        head, lines = self.nested(code, renamed, signature)
        parameters = ", ".join(head)
        is_fragile = any(part.is_fragile for part in read)
        inside = _returned(code, lines)
        if inside is not None and not unread and not signature.annotations:
            colon = f" {parameters}:" if parameters else ":"
            text = f"(lambda{colon} {inside})"
            self.push(Expression(text, is_fragile=is_fragile, reads=reads_of(read)))
            return
        title = self._title(code)
        result = (signature.annotations or {}).get("return")
        arrow = "" if result is None else f" -> {result}"
        self.rebinding(title, has_effects=is_fragile or self.is_shared(title))
        is_async = code.co_flags & 0x280  # a coroutine, an asynchronous generator
        self.emit(f"{'async ' if is_async else ''}def {title}({parameters}){arrow}:")
        for line in lines:
            self.emit(line)
        for what, part in unread:
            self.emit(f"{title}.{what} = {part.text}")
        self.push(name(title))

    def _free_names(self, code: CodeType, closure: Part | None) -> dict[str, str]:
        """Return the new names of a function's free variables that have another name here."""
        found: dict[str, str] = {}
        cells = (closure.items if closure is not None else None) or ()
        for title, cell in zip(code.co_freevars, cells, strict=False):
            if not isinstance(cell, Cell):
                found[title] = f"{self.named(cell).owner}.cell_contents"
            elif cell.variable != title:
                found[title] = cell.variable
        return found

    def _signature(self, parts: dict[int, Part]) -> tuple[Signature, list[tuple[str, Part]]]:
        """Return what can be written in the head of a function, and the attributes to set after it."""
        signature, unread = Signature(), []
        defaults, keywords = parts.get(_DEFAULTS), parts.get(_KW_DEFAULTS)
        annotations = parts.get(_ANNOTATIONS)
        if defaults is not None:
            if defaults.items is None:
                unread.append(("__defaults__", defaults))
            signature.defaults = tuple(each.text for each in defaults.items or ())
        if keywords is not None:
            signature.kw_defaults = _by_word(keywords)
            if signature.kw_defaults is None:
                unread.append(("__kwdefaults__", keywords))
        if annotations is not None:
            items = annotations.items or ()
            words = [each.value if isinstance(each, Constant) else None for each in items[::2]]
            texts = [each.text for each in items[1::2]]
            signature.annotations = dict(zip(map(str, words), texts, strict=False))
        return signature, unread

    def _title(self, code: CodeType) -> str:
        """Return the name for a function: its own, if it is stored under that name next."""
        title = code.co_name
        for ins in self.instructions[self.at + 1 :]:
            if ins.argval == title and ins.opname in _STORES:
                return self.renamed.get(title, title)
            if ins.argval == title or "JUMP" in ins.opname or ins.opname.startswith("RETURN"):
                break
        return self.scope.fresh_like(title)


def parameters(code: CodeType, signature: Signature | None = None) -> list[str]:
    """Return the parameters of a function as they are written."""
    signature = signature or Signature()
    count, names = code.co_argcount, list(code.co_varnames)
    after = count + code.co_kwonlyargcount
    first = count - len(signature.defaults)
    shown = [
        signature.of(each, signature.defaults[index - first] if index >= first else None)
        for index, each in enumerate(names[:count])
    ]
    if code.co_posonlyargcount:
        shown.insert(code.co_posonlyargcount, "/")
    if code.co_flags & 0x04:
        shown.append(signature.of(f"*{names[after]}", None))
    elif code.co_kwonlyargcount:
        shown.append("*")
    kw_defaults = signature.kw_defaults or {}
    shown += [signature.of(each, kw_defaults.get(each)) for each in names[count:after]]
    if code.co_flags & 0x08:
        shown.append(signature.of(f"**{names[after + bool(code.co_flags & 0x04)]}", None))
    return shown


def _returned(code: CodeType, lines: Sequence[str]) -> str | None:
    """Return the expression of a lambda, if its body is nothing else."""
    if code.co_name != "<lambda>" or len(lines) != 1 or not lines[0].startswith("    return "):
        return None
    return lines[0].removeprefix("    return ")


def _by_word(value: Part) -> dict[str, str] | None:
    """Return the texts in a dict whose keys are words, None for any other."""
    if not isinstance(value, Display) or value.name is not None:
        return None
    found = {}
    for each in value.elements:
        key = each.of[0] if isinstance(each, Pair) else None
        if not isinstance(each, Pair) or not isinstance(key, Constant):
            return None
        found[str(key.value)] = each.of[1].text
    return found
