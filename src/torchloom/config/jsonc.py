"""JSON as people write it: comments and trailing commas allowed, duplicate keys found.

    { // a comment          {
      "stage": 3, # other     "stage": 3
    }                       }

Comments are blanked, not cut, so that the line and column of a syntax error are those of the
file. What is no JSON even so is read as Hjson (keys without quotes, no commas) if the package `hjson` is
installed, which DeepSpeed reads all its files with.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_NOT_NEWLINE = re.compile(r"[^\n]")


class Parsed(NamedTuple):
    """A JSON document, and the dotted paths of keys that it gives twice."""

    tree: object
    duplicates: tuple[str, ...]


class JsonSyntaxError(ValueError):
    """The text is not JSON; says where."""

    def __init__(
        self, message: str, line: int = 0, column: int = 0, fix: str = "correct the file there"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.column = column
        self.fix = fix


def parse(text: str) -> Parsed:
    """Parse JSON with comments, trailing commas, `Infinity` and large exponents, or Hjson.

    Raises:
        JsonSyntaxError: the text is not JSON; carries line and column.

    Example:
        >>> parse('{"a": 1, "a": 2, /* twice */}')
        Parsed(tree={'a': 2}, duplicates=('a',))
    """
    clean = _TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, text))
    repeated: dict[int, list[str]] = {}

    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        built = dict(pairs)
        if len(built) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated[id(built)] = sorted({key for key in keys if keys.count(key) > 1})
        return built

    try:
        tree = json.loads(clean, object_pairs_hook=build)
    except json.JSONDecodeError as error:
        repeated.clear()
        tree = _hjson(text, build, error)
    except RecursionError:
        raise JsonSyntaxError("nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise JsonSyntaxError(str(error)) from None
    return Parsed(tree, tuple(_paths_of(tree, repeated, "")))


def _hjson(
    text: str, build: Callable[[list[tuple[str, object]]], object], error: json.JSONDecodeError
) -> object:
    """Parse Hjson; without the package, raise what is wrong with the text as JSON."""
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        fix = "correct the file there, or `pip install hjson` if it is Hjson"
        raise JsonSyntaxError(error.msg, error.lineno, error.colno, fix) from None
    if not text.strip():  # Hjson for {}
        raise JsonSyntaxError(error.msg, error.lineno, error.colno)
    try:
        return hjson.loads(text, object_pairs_hook=build)
    except hjson.HjsonDecodeError as wrong:
        raise JsonSyntaxError(wrong.msg, wrong.lineno, wrong.colno) from None
    except RecursionError:
        raise JsonSyntaxError("nested too deeply") from None


def join(path: str, key: str | int) -> str:
    """Return the path of an entry: `a.b` for a key, `a[0]` for an index.

    Example:
        >>> join(join("compile.schedule", 0), "x")
        'compile.schedule[0].x'
    """
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def _blank(match: re.Match[str]) -> str:
    text = match.group()
    return text if text.startswith('"') else _NOT_NEWLINE.sub(" ", text)


def _paths_of(node: object, repeated: dict[int, list[str]], path: str) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (join(path, key) for key in repeated.get(id(node), ()))
        for key, item in node.items():
            yield from _paths_of(item, repeated, join(path, key))
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from _paths_of(item, repeated, join(path, index))
