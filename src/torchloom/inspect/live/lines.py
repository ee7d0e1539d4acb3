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
_OWN = str(Path(__file__).parents[2]) + os.sep
_RECIPES = _OWN + "recipes" + os.sep
"""Programs that users run as their own."""


def resolve_lines(
    guards: Iterable[Guard],
    code: CodeType | None,
    files: Iterable[str],
    lines: Mapping[str, str] | None = None,
) -> None:
    """Write the whole path of each guard's line, in place; lines of torch and torchloom are dropped.

    Args:
        guards: of one entry.
        code: the function; its own file is tried first.
        files: paths that Dynamo has met; files in `linecache` are tried as well.
        lines: full `file:line` by the text of a guard, for guards whose line is known from the trace.
    """
    own = [] if code is None else [code.co_filename]
    every = dict.fromkeys([*own, *files, *linecache.cache])
    known = [path for path in every if not is_library(path)]
    for guard in guards:
        guard.user_line = (lines or {}).get(guard.text) or _resolved(guard.user_line, known)


def is_library(path: str) -> bool:
    """Return whether a file is one of torch, torchloom or Python's start, and not of the user's program."""
    is_own = path.startswith(_OWN) and not path.startswith(_RECIPES)
    return is_own or path.startswith((_TORCH, "<frozen "))


def _resolved(place: str | None, known: Iterable[str]) -> str | None:
    """Return the full path of a place of which Dynamo wrote the end; None for a line of a library."""
    if not place:
        return None
    path, _, line = place.rpartition(":")
    matching = [file for file in known if file.endswith(path)]
    if Path(path).is_absolute() and not matching:
        return None if is_library(path) else place
    return f"{matching[0]}:{line}" if matching else None
