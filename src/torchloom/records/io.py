"""Reads and writes records as JSON files with a version."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchloom.errors import RecordError
from torchloom.files import from_plain, write_whole
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
