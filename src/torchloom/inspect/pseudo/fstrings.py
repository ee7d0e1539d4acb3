"""Formatted strings: joins their parts again where Python can parse the result."""

from __future__ import annotations

import dis

from torchloom.inspect.pseudo.displays import Displays
from torchloom.inspect.pseudo.values import (
    Constant,
    Converted,
    Formatted,
    Part,
    reads_of,
)

_CONVERSIONS = {1: ("str", "!s"), 2: ("repr", "!r"), 3: ("ascii", "!a")}


class Strings(Displays):
    """Instructions that format values."""

    def op_FORMAT_VALUE(self, ins: dis.Instruction) -> None:
        arg = ins.arg or 0
        spec = self.pop() if arg & 4 else None
        self._format(self.pop(), _CONVERSIONS.get(arg & 3, ("", ""))[1], spec)

    def op_FORMAT_SIMPLE(self, ins: dis.Instruction) -> None:
        self._format(self.pop(), "", None)

    def op_FORMAT_WITH_SPEC(self, ins: dis.Instruction) -> None:
        value, spec = self.pop_many(2)
        self._format(value, "", spec)

    def op_CONVERT_VALUE(self, ins: dis.Instruction) -> None:
        value = self.pop()
        function, conversion = _CONVERSIONS.get(ins.arg or 1, _CONVERSIONS[1])
        text = f"{function}({value.text})"
        if not _fits(value.text):
            value = self.named(value)
            text = f"{function}({value.text})"
        self.push(Converted(text, True, True, value.reads, of=value.text, conversion=conversion))

    def _format(self, value: Part, conversion: str, spec: Part | None) -> None:
        if isinstance(value, Converted):
            text, conversion = value.of, value.conversion
        else:
            if not _fits(value.text):
                value = self.named(value)
            text = value.text
        depth, ending = 0, ""
        if spec is not None:
            ending, depth = self._spec(spec)
        if text[:1] == "{" or text[-1:] == "}":
            text = f" {text} "
        self._push_formatted(f"{{{text}{conversion}{ending}}}", [value], depth)

    def _spec(self, spec: Part) -> tuple[str, int]:
        """Return the format behind its colon, and how deep values lie in it."""
        if isinstance(spec, Constant) and isinstance(spec.value, str):
            if spec.value.isprintable() and not set(spec.value) & set("{}\"'\\"):
                return f":{spec.value}", 0
        elif isinstance(spec, Formatted) and spec.depth == 0:
            return f":{spec.inside}", 1
        if not _fits(spec.text):
            spec = self._named(spec)
        return f":{{{spec.text}}}", 1

    def op_BUILD_STRING(self, ins: dis.Instruction) -> None:
        parts = self.pop_many(ins.arg or 0)
        inside, depth = "", 0
        for part in parts:
            if isinstance(part, Constant) and isinstance(part.value, str):
                inside += _literal(part.value)
            elif isinstance(part, Formatted):
                inside += part.inside
                depth = max(depth, part.depth)
            else:
                inside += f"{{{part.text}}}"
        self._push_formatted(inside, parts, depth)

    def _push_formatted(self, inside: str, parts: list[Part], depth: int) -> None:
        reads = reads_of(parts)
        self.push(Formatted(f'f"{inside}"', True, True, reads, inside=inside, depth=depth))


def _fits(text: str) -> bool:
    """Return whether an expression can stand between double quotes before Python 3.12 as well."""
    return not set(text) & set('"\\#\n') and ("{" not in text or "'" not in text)


def _literal(text: str) -> str:
    """Return text as it is written in an f-string with double quotes."""
    body = repr('"' + text)[2:-1]  # single quotes around it, because of the double one
    body = body.replace("\\'", "'").replace('"', '\\"')
    return body.replace("{", "{{").replace("}", "}}")
