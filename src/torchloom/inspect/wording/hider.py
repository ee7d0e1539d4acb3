"""Hiding keys and attributes that came while the program ran, in all texts of a record alike.

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
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch


class Words:
    """The words of the code that was traced, of torch and of Python's builtins.

    Args:
        codes: the functions that were traced, inlined ones as well.
    """

    def __init__(self, codes: Iterable[CodeType] = ()) -> None:
        self._codes = {id(code): code for code in codes}
        self._words = set(_given_words())
        for code in list(self._codes.values()):
            self._words.update(_words_of(code))
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


def _words_of(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
    yield code.co_name
    yield from _words_in(code.co_consts)


def _words_in(constants: Iterable[Any]) -> Iterator[str]:
    for each in constants:
        # By exact type: Dynamo puts objects of the program among constants.
        if type(each) is str:
            yield each
        elif type(each) is bytes:
            yield each.decode("latin-1")
        elif type(each) is CodeType:
            yield from _words_of(each)
        elif type(each) in (tuple, frozenset):
            yield from _words_in(each)


@functools.cache
def _given_words() -> frozenset[str]:
    """Return the names of Python's builtins and of torch, which Dynamo reads by itself."""
    owners = (
        *(builtins, object, type, dict, list, tuple, set, str, int, float, complex, range, slice),
        *(FunctionType, MethodType, ModuleType, CodeType, property, enum.Enum),
        *(collections.defaultdict, collections.OrderedDict, collections.deque),
        *(functools.partial, torch, torch.Tensor, torch.nn, torch.nn.functional, torch.nn.Module),
    )
    module_code = [
        each.__code__ for each in vars(torch.nn.Module).values() if isinstance(each, FunctionType)
    ]
    return frozenset(
        {
            *(name for owner in owners for name in dir(owner)),
            *vars(torch.nn.Module()),
            "cell_contents",
            *(word for code in module_code for word in _words_of(code)),
        }
    )


@functools.lru_cache(maxsize=256)
def _names_in(file: str) -> frozenset[str]:
    """Return the names in the source of a file, without its strings, which may be secrets."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    return frozenset(_names_of(tree))


def _names_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name


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


_MESSAGE = re.compile(r"((?:Message: |with message |\(reason: ))(.*?)(\.?\)?)$", re.S)


class Hider:
    """Collects keys that the source does not contain, and removes them from texts."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self._labels: dict[str, str] = {}
        """The label that replaces each key."""
        self._forms: dict[str, str] = {}
        """What replaces each text, in lower case, in which a key appears."""
        self._pattern: re.Pattern[str] | None = None

    def note(self, text: str) -> None:
        """Look for keys in the source of a value, or in a check of one."""
        for found in keys_in(text):
            if not self.words.knows(found.key):
                self._note(found)

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
            # A form is not found within a longer word; others of Python's names may go on behind it.
            each = (
                ("(?<![A-Za-z0-9])" if form[0].isalnum() else "")
                + re.escape(form)
                + ("(?![A-Za-z0-9])" if form[-1].isalnum() else "")
                for form in forms
            )
            self._pattern = re.compile("|".join(each), re.IGNORECASE)
        return self._pattern.sub(lambda match: self._forms[match.group(0).lower()], text)

    def _note(self, found: SourceKey) -> None:
        key, begin = found.key, found.begin
        label = self._labels.setdefault(key, f"key {len(self._labels) + 1}")
        word = label.replace(" ", "_")
        forms = dict.fromkeys((repr(key), ascii(key), f'"{key}"', f"b{key!r}"), f"<{label}>")
        if begin:  # the name that Dynamo makes of the source for the input of a graph
            forms[_mangled(f"{begin} {key}")] = self.text(_mangled(begin)) + f"_{word}"
        if key.isidentifier() or found.is_attribute:
            forms[f".{key}"] = f".<{label}>"
        if found.is_attribute:  # as bytecode is printed
            forms |= {f"{sign}{key})": f"{sign}{word})" for sign in "( |"}
        new = {form.lower(): stands for form, stands in forms.items() if form}
        if any(form not in self._forms for form in new):
            self._forms = {**new, **self._forms}
            self._pattern = None

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


def told(text: str, words: Words) -> str:
    """Return what Dynamo says of a graph break without the strings that the program made while running."""

    def shown(match: re.Match[str]) -> str:
        return match.group(0) if all(map(words.knows, strings_in(match.group(0)))) else "<str>"

    message = _MESSAGE.search(text)
    if message is None:
        return QUOTED.sub(shown, text)
    head, said, tail = message.groups()
    kept = said if said in ("", "None") or words.knows(said) else "<str>"
    return f"{QUOTED.sub(shown, text[: message.start()])}{head}{kept}{tail}"


def _mangled(key: str) -> str:
    """Return a key as it stands in the name of a graph's input."""
    return re.sub(r"[^a-zA-Z0-9]+", "_", key).strip("_")
