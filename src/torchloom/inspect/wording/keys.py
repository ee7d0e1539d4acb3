"""The keys and attributes that the source of a guarded value names, such as `a` in `L['d']['a']`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

_LITERAL = r"""b?(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
QUOTED = re.compile(rf"(?<!\w){_LITERAL}")
_SUBSCRIPT = re.compile(rf"(\w*)\[({_LITERAL}|\([^\[\]]*\))\]")
_NAMED = re.compile(
    rf"___(?:dict|set)_contains\(({_LITERAL}),"
    rf"|(?:\b(?:get|has)attr|__getattribute__|set\.__contains__)\([^'\"]*(?:['\"][^'\"]*['\"][^'\"]*)*?, ({_LITERAL})\)"
)
_KEYS = re.compile(r"list\(dict\.keys\((.*)\)\)\[\d+\] == (.*)", re.S)
_ATTRIBUTE = re.compile(r"(?<=[\w\])])\.([A-Za-z_]\w*)")
_BEGIN = re.compile(r"\b[LG](?=\[['\"])")
_TORCHS = re.compile(r"<class '[^']*'>|(?<!['\"])\b(?:torch|utils_device)(?:\.\w+)+")
_TABLES = ("_modules", "_parameters", "_buffers")


class SourceKey(NamedTuple):
    """A key or an attribute in the source of a value."""

    key: str
    begin: str = ""
    """The source of what has it, where it is known."""
    is_attribute: bool = False


def keys_in(text: str) -> Iterator[SourceKey]:
    """Yield the keys and attributes by which the source of a value, or a check, names values.

    Names of arguments and globals, and of modules, parameters and buffers, are none.

    Example:
        >>> [each.key for each in keys_in("L['d']['a'].b")]
        ['a', 'b']
    """
    text = _TORCHS.sub("", text)
    by_key = _KEYS.fullmatch(text)
    if by_key:
        text = by_key.group(1)
        if not text.endswith(_TABLES):
            yield from map(SourceKey, strings_in(by_key.group(2)))
    for match in _SUBSCRIPT.finditer(text):
        before, inner = match.groups()
        is_name = before in ("L", "G") and text[: match.start()][-1:] not in ("'", '"', "]", ".")
        if is_name or before in _TABLES:
            continue
        begin = text[: match.start(2) - 1]
        for key in strings_in(inner):
            # What an object holds may be read as its attribute.
            yield SourceKey(key, _path(begin), begin.endswith(".__dict__"))
    for match in _NAMED.finditer(text):
        for key in strings_in(match.group(1) or match.group(2)):
            path = _path(text[: match.start(match.lastindex or 0)])
            yield SourceKey(key, path, is_attribute="_contains" not in match.group())
    # Dots within keys are none of attributes'.
    bare = QUOTED.sub(lambda match: "'" + "_" * (len(match.group(0)) - 2) + "'", text)
    for match in _ATTRIBUTE.finditer(bare):
        yield SourceKey(match.group(1), _path(text[: match.start()]), is_attribute=True)


def _path(text: str) -> str:
    """Return the end of a text from the argument or global on with which a source begins."""
    begins = list(_BEGIN.finditer(text))
    return text[begins[-1].start() :] if begins else ""


def strings_in(code: str) -> Iterator[str]:
    """Yield the values of the string literals in code, bytes as text."""
    for match in QUOTED.finditer(code):
        try:
            value = ast.literal_eval(match.group(0))
        except (ValueError, SyntaxError):
            value = match.group(0)[1:-1]
        yield value if isinstance(value, str) else value.decode("latin-1")
