"""Hides keys and attributes that came while the program ran, in all texts of a record alike.

Dynamo writes keys of dicts and names of attributes into the sources of guards, into names of graph inputs, into
reasons and into bytecode. Where the source of the program says them, they are shown. A key that was read from
a file, or put together at run time, may be a secret: it is hidden everywhere.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import enum
import functools
import linecache
import re
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from torchloom.inspect.pseudo.source import words_of


class Words:
    """The words of the code that was traced, of torch and of Python's builtins.

    Args:
        codes: the functions that were traced, inlined ones as well.
    """

    def __init__(self, codes: Iterable[CodeType] = ()) -> None:
        self._codes = {id(code): code for code in codes}
        self._words = set(_given_words())
        for code in list(self._codes.values()):
            self._words.update(words_of(code))
        self._files: list[str] | None = None

    def knows(self, word: str) -> bool:
        """Return whether a word occurs in the source; words of one character always count as known."""
        if len(word) <= 1 or word in self._words or re.fullmatch(r"__\w+__|_dynamo_\w+", word):
            return True
        if self._files is None:  # names of the files, only when they are asked for
            self._files = list(dict.fromkeys(code.co_filename for code in self._codes.values()))
        while self._files:
            self._words.update(_names_in(self._files.pop(0)))
            if word in self._words:
                return True
        return False


@functools.cache
def _given_words() -> frozenset[str]:
    """Return the names of Python's builtins and of torch, which Dynamo reads by itself."""
    owners = (
        *(builtins, object, type, dict, list, tuple, set, str, int, float, complex, range, slice),
        *(FunctionType, MethodType, ModuleType, CodeType, property, enum.Enum),
        *(collections.defaultdict, collections.OrderedDict, collections.deque),
        *(functools.partial, torch, torch.Tensor, torch.nn, torch.nn.functional, torch.nn.Module),
    )
    methods = [each for each in vars(torch.nn.Module).values() if isinstance(each, FunctionType)]
    words = [word for owner in owners for word in dir(owner)]
    words += [word for each in methods for word in words_of(each.__code__)]
    return frozenset({*words, *vars(torch.nn.Module()), "cell_contents"})


@functools.lru_cache(maxsize=256)
def _names_in(file: str) -> frozenset[str]:
    """Return the names in the source of a file, without its strings, which may be secrets."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    fields = ("id", "attr", "arg", "name")
    names = (getattr(node, field, None) for node in ast.walk(tree) for field in fields)
    return frozenset(name for name in names if isinstance(name, str))


_LITERAL = r"""b?(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
_QUOTED = re.compile(rf"(?<!\w){_LITERAL}")
_TABLE = r"\._(?:modules|parameters|buffers)"
_KEYS = re.compile(
    # Names of arguments and globals, of modules, parameters, buffers and torch's classes are none.
    rf"(?<![\w.\]'\"])[LG]\[{_LITERAL}\]|{_TABLE}(?:\[{_LITERAL}\]|\)\)\[\d+\] == .*)|<class '[^']*'>"
    r"|(?<!['\"])\b(?:torch|utils_device)(?:\.\w+)+"
    # Subscripts, first and last arguments of calls, elements of a dict's keys; attributes.
    rf"|\[(?P<item>{_LITERAL}|\([^\[\]]*\))\]|\((?P<first>{_LITERAL}),|, (?P<last>{_LITERAL})\)"
    r"|\)\[\d+\] == (?P<key>.*)|(?<=[\w\])])\.(?P<name>[A-Za-z_]\w*)",
    re.S,
)


def keys_in(text: str) -> Iterator[str]:
    """Yield the keys and attributes by which the source of a value, or a check, names values.

    Example:
        >>> list(keys_in("L['d']['a'].b"))
        ['a', 'b']
    """
    for match in _KEYS.finditer(text):
        if match["name"]:
            yield match["name"]
        yield from _strings_in("".join(part for part in match.groups()[:4] if part))


def _strings_in(code: str) -> Iterator[str]:
    """Yield the values of the string literals in code, bytes as text."""
    for literal in _QUOTED.findall(code):
        try:
            value = ast.literal_eval(literal)
        except (ValueError, SyntaxError):
            value = literal[1:-1]
        yield value if isinstance(value, str) else value.decode("latin-1")


class Hider:
    """Collects keys that the source does not contain, and removes them from texts."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self._labels: dict[str, str] = {}
        """The label that replaces each key."""
        self._forms: dict[str, str] = {}
        """What replaces each text, in lower case, in which a key appears."""
        self._pattern: re.Pattern[str] | None = None

    def check(self, text: str) -> str:
        """Note the keys in a check, and return it without other strings that may be secrets."""
        self.note(text)
        return text if _KEY_OF.match(text) else without_values(text)

    def note(self, text: str) -> None:
        """Look for keys in the source of a value, or in a check of one."""
        for key in keys_in(text):
            if key not in self._labels and not self.words.knows(key):
                label = self._labels[key] = f"key {len(self._labels) + 1}"
                quoted = (repr(key), ascii(key), f'"{key}"', f"b{key!r}")
                word = label.replace(" ", "_")
                found = {
                    **dict.fromkeys((key, _mangled(key)), word),
                    **dict.fromkeys(quoted, f"<{label}>"),
                    f".{key}": f".<{label}>",
                }
                self._forms |= {form.lower(): shown for form, shown in found.items() if form}
                self._pattern = None

    def in_record(self, value: Any) -> None:
        """Remove the keys from all texts of a record, in place; the program's own source stays."""
        if self._labels:
            self._clean(value)

    def text(self, text: str) -> str:
        """Return a text without the keys: `d[<key 1>]`, and `L_d_key_1_` for the input of a graph."""
        if not self._forms:
            return text
        if self._pattern is None:
            forms = sorted(self._forms, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(_pattern_of, forms)), re.IGNORECASE)
        return self._pattern.sub(lambda match: self._forms[match.group(0).lower()], text)

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            value[:] = [self._clean(each) for each in value]
        elif isinstance(value, dict):
            items = [(self._clean(key), self._clean(each)) for key, each in value.items()]
            value.clear()
            value.update(items)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                if (type(value).__name__, field.name) not in _SOURCES:
                    setattr(value, field.name, self._clean(getattr(value, field.name)))
        return value


_SOURCES = frozenset(
    {("Function", name) for name in ("name", "qualname", "file", "source")}
    | {("Entry", "stack"), ("Entry", "compile_id"), ("Guard", "user_line"), ("Guard", "kind")}
    | {("Break", "user_stack"), ("Kernel", "language"), ("Artifact", "kind")}
)
"""Fields that hold places or text of the program's own source, or words of torchloom."""


def _pattern_of(form: str) -> str:
    """Return where a form of a key is one: within names that Dynamo makes, or alone in brackets as bytecode is printed."""
    text = re.escape(form)
    if form.startswith(("'", '"', "b'", 'b"')):
        return text
    if form.startswith("."):
        return rf"{text}(?![a-z0-9])"
    return rf"(?<=[a-z0-9]_){text}(?![a-z0-9])|(?<=[( |]){text}(?=\))"


def _mangled(key: str) -> str:
    """Return a key as it stands in the name of a graph's input."""
    return re.sub(r"[^a-zA-Z0-9]+", "_", key).strip("_")


_VALUE = re.compile(rf"(?<![\[\w]){_LITERAL}")
_WORD = re.compile(r"""b?['"]\w{0,20}(?:[:.]\w{1,8})?['"]""")
_MANY_DIGITS = re.compile(r"\d\D*\d\D*\d")
_COMPARED = re.compile(r".*?(?:___set_contains\(|set\.__contains__\(| == )", re.S)
_KEY_OF = re.compile(r"list\(dict\.keys\(.*\)\)\[\d+\] == ")
_OF_GLOBAL = re.compile(r"(?<![\w'\"])G\[")


def without_values(text: str) -> str:
    """Return a check without strings that may be secrets: only short words, such as modes, are left.

    Strings of globals are always hidden, also within calls. The source of the value stays readable.

    Example:
        >>> without_values("L['mode'] == 'mean'"), without_values("L['key'] == 'sk-12ab-99'")
        ("L['mode'] == 'mean'", "L['key'] == <str>")
    """
    if text.startswith("BACKEND_MATCH failure"):  # goes on with both backends in printed form
        return "BACKEND_MATCH failure"
    left = _COMPARED.match(text)
    if left is None:
        return text
    is_global = _OF_GLOBAL.search(text) is not None

    def is_plain(word: str) -> bool:
        return not is_global and bool(_WORD.fullmatch(word)) and not _MANY_DIGITS.search(word)

    return left[0] + _without_strings(_VALUE, text[left.end() :], is_plain)


def _without_strings(of: re.Pattern[str], text: str, is_shown: Callable[[str], bool]) -> str:
    return of.sub(lambda match: match[0] if is_shown(match[0]) else "<str>", text)


_MESSAGE = re.compile(r"((?:Message: |with message |\(reason: ))(.*?)(\.?\)?)$", re.S)


def told(text: str, words: Words) -> str:
    """Return what Dynamo says of a graph break without the strings that the program made while running."""

    def is_known(literal: str) -> bool:
        return all(map(words.knows, _strings_in(literal)))

    def message(match: re.Match[str]) -> str:
        head, said, tail = match.groups()
        return f"{head}{said if said in ('', 'None') or words.knows(said) else '<str>'}{tail}"

    head = _MESSAGE.search(text)
    end = head.start() if head else len(text)
    return _without_strings(_QUOTED, text[:end], is_known) + _MESSAGE.sub(message, text[end:])
