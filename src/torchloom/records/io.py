"""Reads and writes records as JSON files with a version."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchloom.errors import RecordError
from torchloom.files import write_whole
from torchloom.records.model import Session

SCHEMA = "torchloom.record"
SCHEMA_VERSION = 1
"""Increased when readers of the old version would misread the new one. New fields do not increase it."""


def to_json(session: Session) -> dict[str, Any]:
    """Return a record as plain data."""
    return {"schema": SCHEMA, "version": SCHEMA_VERSION, **dataclasses.asdict(session)}


def from_json(data: Mapping[str, Any], name: str = "the record") -> Session:
    """Return the record in plain data, without the fields that this version does not know.

    Raises:
        RecordError: this is no record, or one of a newer version.
    """
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        raise RecordError(f"{name} is not a torchloom record: write one with torchloom.watch(path)")
    version = data.get("version")
    if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
        raise RecordError(
            f"{name} has version {version!r}, this torchloom reads 1 to {SCHEMA_VERSION}: "
            "use the torchloom that wrote it, or a newer one"
        )
    try:
        return from_plain(Session, data)
    except (TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"{name} is damaged: {error}") from error


def save_record(session: Session, path: str | Path) -> Path:
    """Write a record as JSON; readers see the whole file or none.

    Args:
        session: the record.
        path: of the file; folders above it are made.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(to_json(session), ensure_ascii=False)
    # Python's strings may hold halves of characters, which no file can.
    return write_whole(path, text.encode("utf-8", "backslashreplace"))


def load_record(path: str | Path) -> Session:
    """Read a record.

    Raises:
        RecordError: there is no such file, or it is not a record.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"record {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"record {str(path)!r} is not JSON: {error}") from None
    return from_json(data, repr(str(path)))


_hints = functools.cache(typing.get_type_hints)


def from_plain(of: type[Any], data: Any, *, is_exact: bool = False) -> Any:
    """Build a dataclass, and the dataclasses and named tuples in it, from what JSON held of it.

    Args:
        of: the dataclass.
        data: its fields by name; those that have a default may be missing.
        is_exact: refuse fields that the class does not know, also inside of it, instead of leaving them out.

    Raises:
        TypeError: a value has another type than its field, or fields are missing, or refused.
        ValueError: a tuple has another length than its field.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"a {of.__name__} is written as {type(data).__name__}")
    hints = _hints(of)
    if is_exact and (unknown := sorted(data.keys() - hints.keys())):
        raise TypeError(f"a {of.__name__} has no {', '.join(unknown)}")
    return of(
        **{
            key: _value(f"{of.__name__}.{key}", hints[key], data[key], is_exact)
            for key in hints.keys() & data.keys()
        }
    )


def _value(name: str, hint: Any, value: Any, is_exact: bool) -> Any:
    """Return plain data as a value of a field's type."""
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, value, is_exact=is_exact)
    if origin in (typing.Union, types.UnionType):  # a type, or None
        return None if value is None else _value(name, args[0], value, is_exact)
    is_of_many = isinstance(origin, type) and issubclass(origin, (list, tuple, frozenset))
    if is_of_many and isinstance(value, list):
        if hasattr(origin, "_make"):  # a named tuple
            args = tuple(_hints(origin).values())
        is_alike = origin in (list, frozenset) or args[1:] == (...,)
        kinds = args[:1] * len(value) if is_alike else args
        found = [_value(name, *each, is_exact) for each in zip(kinds, value, strict=True)]
        return getattr(origin, "_make", origin)(found)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _value(name, args[1], each, is_exact) for key, each in value.items()}
    fits = {float: (int, float), Any: object}.get(origin, origin)
    if not isinstance(value, fits) or (isinstance(value, bool) and hint in (int, float)):
        raise TypeError(f"{name} cannot be {type(value).__name__}")
    return value
