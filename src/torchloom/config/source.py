"""Read a configuration from any source into one plain dict, a copy; JSON as people write it.

    { // a comment          {
      "stage": 3, # other     "stage": 3
    }                       }

Comments are blanked, not cut, so that the line and column of a syntax error are those of the
file. What is no JSON even so is read as Hjson (keys without quotes, no commas) if the package `hjson` is
installed, which DeepSpeed reads all its files with.

A source is a mapping, a path of any kind, URL-safe base64 of JSON text (as launchers pass it), or nothing.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from torchloom.config.findings import Findings
from torchloom.errors import ConfigError

_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_NOT_NEWLINE = re.compile(r"[^\n]")


class JsonObject(dict[str, object]):
    """A JSON object that knows which keys its text gives more than once."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        counts = Counter(key for key, _ in pairs)
        self.repeated = sorted(key for key, count in counts.items() if count > 1)


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


def parse(text: str) -> object:
    """Parse JSON with comments, trailing commas, `Infinity` and large exponents, or Hjson.

    Raises:
        JsonSyntaxError: the text is not JSON; carries line and column.

    Example:
        >>> parse('{"a": 1, "b": [2], /* no more */}')
        {'a': 1, 'b': [2]}
    """
    clean = _TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, text))
    try:
        return json.loads(clean, object_pairs_hook=JsonObject)
    except json.JSONDecodeError as error:
        return _hjson(text, error)
    except RecursionError:
        raise JsonSyntaxError("nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise JsonSyntaxError(str(error)) from None


def _hjson(text: str, error: json.JSONDecodeError) -> object:
    """Parse Hjson; without the package, raise what is wrong with the text as JSON."""
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        fix = "correct the file there, or `pip install hjson` if it is Hjson"
        raise JsonSyntaxError(error.msg, error.lineno, error.colno, fix) from None
    if not text.strip():  # Hjson for {}
        raise JsonSyntaxError(error.msg, error.lineno, error.colno)
    try:
        return hjson.loads(text, object_pairs_hook=JsonObject)
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


Source: TypeAlias = "Mapping[str, object] | str | os.PathLike[str] | None"
MAX_DEPTH = 32


class Document(NamedTuple):
    """The settings as written, and a name for messages."""

    name: str
    tree: dict[str, object]


def read(source: Source, findings: Findings) -> Document:
    """Read a source into a dict of our own; the caller's object is not changed.

    Raises:
        ConfigError: there is no such file, or it does not hold a JSON object.
    """
    if source is None:
        return Document("the defaults", {})
    if isinstance(source, Mapping):
        return Document("the configuration", _copy_mapping(source, findings))
    if isinstance(source, os.PathLike):
        source = Path(source)
    elif not isinstance(source, str):
        raise ConfigError(
            f"a configuration is a dict, a path or a base64 string, not {type(source).__name__}: "
            "pass one of these"
        )
    name, text = _read_text(source)
    try:
        tree = parse(text)
    except JsonSyntaxError as problem:
        where = f"{name}:{problem.line}:{problem.column}" if problem.line else name
        raise ConfigError(
            f"{where}: not valid JSON: {problem.message} "
            f"(line {problem.line} column {problem.column}); {problem.fix}"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: the outermost value must be an object: write {{ ... }}")
    return Document(name, _copy_mapping(tree, findings))


def _read_text(source: str | Path) -> tuple[str, str]:
    path = Path(source)
    if isinstance(source, Path) or _is_there(path):
        return str(path), _read_file(path)
    if source.lstrip().startswith("{"):
        raise ConfigError(
            "the configuration is JSON text: pass json.loads(text), or the path of a file"
        )
    return "the base64 configuration", _decode(source)


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; correct the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; correct the path") from None


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a file name, or holds a NUL
        return False


def _decode(text: str) -> str:
    padded = text.strip() + "=" * (-len(text.strip()) % 4)
    try:
        decoded = base64.b64decode(padded, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        decoded = ""
    if "{" not in decoded:
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise ConfigError(
            f"{shown}: no such file, and not base64 of JSON text either; correct the path"
        )
    return decoded


def _copy_mapping(
    given: Mapping[str, object], findings: Findings, path: str = "", depth: int = 0
) -> dict[str, object]:
    copied: dict[str, object] = {}
    for key in given.repeated if isinstance(given, JsonObject) else ():
        findings.error(join(path, key), "this key is given more than once", "keep one of them")
    for key, value in given.items():
        if not isinstance(key, str):
            findings.error(join(path, str(key)), f"the key {key!r} is not a string", "quote it")
            continue
        copied[key] = _copy(value, findings, join(path, key), depth + 1)
    return copied


def _copy(value: object, findings: Findings, path: str, depth: int) -> object:
    if depth > MAX_DEPTH:
        findings.error(
            path.split(".")[0], f"nested deeper than {MAX_DEPTH} levels", "flatten this section"
        )
        return None
    if isinstance(value, Mapping):
        return _copy_mapping(value, findings, path, depth)
    if isinstance(value, list | tuple):
        return [
            _copy(item, findings, join(path, index), depth + 1) for index, item in enumerate(value)
        ]
    return value
