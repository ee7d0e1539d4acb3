"""Completes the lines of user code that guards name: Dynamo writes only the end of the path."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType

import torch

from torchloom.records import Guard

_TORCH = str(Path(torch.__file__).parent) + os.sep


def resolve_lines(
    guards: Iterable[Guard],
    code: CodeType | None,
    files: Iterable[str],
    lines: Mapping[str, str] | None = None,
) -> None:
    """Write the whole path of each guard's line, in place; lines inside of torch are dropped.

    Args:
        guards: of one entry.
        code: the function; its own file is tried first.
        files: paths that Dynamo has met; files in `linecache` are tried as well.
        lines: full `file:line` by the text of a guard, for guards whose line is known from the trace.
    """
    own = [] if code is None else [code.co_filename]
    every = dict.fromkeys([*own, *files, *linecache.cache])
    known = [path for path in every if not is_torch(path)]
    for guard in guards:
        guard.user_line = (lines or {}).get(guard.text) or _resolved(guard.user_line, known)


def is_torch(path: str) -> bool:
    """Return whether a file is one of torch's own."""
    return path.startswith(_TORCH)


def _resolved(place: str | None, known: Iterable[str]) -> str | None:
    """Return the full path of a place of which Dynamo wrote the end; None for a line of torch."""
    if not place:
        return None
    path, _, line = place.rpartition(":")
    matching = [file for file in known if file.endswith(path)]
    if Path(path).is_absolute() and not matching:
        return None if is_torch(path) else place
    return f"{matching[0]}:{line}" if matching else None
