"""The guards of an entry as data: the leaf checks of Dynamo's guard tree, each once."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from torchloom._torch import introspect
from torchloom.inspect.wording.english import guard_in_words, without_addresses
from torchloom.inspect.wording.hider import without_values
from torchloom.records import Guard

_RELATIONAL = frozenset(
    {"NO_TENSOR_ALIASING", "OBJECT_ALIASING", "STORAGE_OVERLAPPING", "SYMBOLIC_SHAPE"}
)


def guards_of(manager: Any, shown: Callable[[str], str] = without_values) -> list[Guard]:
    """Return the guards below a guard manager.

    A check on several values appears in the tree at each of them; it is listed once.

    Args:
        manager: Dynamo's guard manager of an entry.
        shown: returns what may be shown of a source or a check; default: keys, and short words.
    """
    found: dict[tuple[str, str, str], Guard] = {}
    for source, leaf_type, parts, num_fails in introspect.guard_leaves(manager):
        kind = leaf_type if leaf_type == "LAMBDA_GUARD" else leaf_type.removesuffix("_GUARD")
        if kind == "DIMENSION_DYNAMIC_MARKING":  # five lines that say one thing
            parts = [f"no dim of {source} is marked dynamic or static"]
        for part in parts or [leaf_type]:
            code, _, comment = part.partition("  # ")
            code = shown(code.strip())
            text = without_addresses(code)
            key = (kind, "" if kind in _RELATIONAL else source, text)
            if key in found:
                continue
            found[key] = Guard(
                source=shown(source),
                kind=kind,
                text=text,
                english=guard_in_words(_kind_of(kind, text), source, code),
                user_line=user_line(comment),
                num_fails=num_fails,
            )
    return list(found.values())


def user_line(comment: str) -> str | None:
    """Return `file:line` from the comment that Dynamo puts behind a guard.

    Example:
        >>> user_line("y = x + 1  # demo.py:4 in f")
        'demo.py:4'
    """
    place = comment.rpartition("# ")[2].partition(" in ")[0].strip()
    _, colon, line = place.rpartition(":")
    return place if colon and line.isdigit() else None


def _kind_of(kind: str, text: str) -> str:
    """Return Dynamo's name for a check that it wrote as a plain comparison."""
    if kind == "LAMBDA_GUARD" and "top_saved_tensors_hooks" not in text:
        if " == " in text and ".size()" not in text:
            return "EQUALS_MATCH"
        return "SHAPE_ENV"
    return kind


_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = str(Path(__file__).parents[2]) + os.sep
_RECIPES = _OWN + "recipes" + os.sep
"""Programs that users run as their own."""


def resolve_lines(guards: Iterable[Guard], code: CodeType | None) -> None:
    """Write the whole path of each guard's line, in place; lines of torch and torchloom are dropped.

    Args:
        guards: of one entry.
        code: the function; its own file is tried first, then those that Dynamo has met, then those in `linecache`.
    """
    own = [] if code is None else [code.co_filename]
    every = dict.fromkeys([*own, *introspect.interned_files().values(), *linecache.cache])
    known = [path for path in every if not is_library(path)]
    for guard in guards:
        guard.user_line = _resolved(guard.user_line, known)


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
