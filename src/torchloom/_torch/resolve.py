"""Whether this torch has the names of the table."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torchloom._torch.table import NAMES, PrivateName


def absent() -> Iterator[tuple[PrivateName, str]]:
    """Yield the names that this torch lacks and that have no other in their place, with why they are not found."""
    rows = {row.name: row for row in NAMES}
    for row in NAMES:
        if (reason := why_missing(row.name)) is None:
            continue
        if row.instead and why_missing(rows[row.instead].name) is None:
            continue
        yield row, reason


def is_expected(row: PrivateName) -> bool:
    """Return whether the table says that this torch has a name."""
    return row.holds_on(torch.__version__)


@functools.cache
def why_missing(name: str) -> str | None:
    """Return why a name of the table is not found in this torch, None if it is.

    Example:
        >>> why_missing("torch._dynamo.eval_frame.OptimizedModule")
        >>> why_missing("torch._dynamo.no_such_name")
        'torch._dynamo has no no_such_name'
    """
    path, _, word = name.partition(":")
    if word:
        return (
            None
            if re.search(rf"\b{word}\b", _source(path))
            else f"{word} is not in the source of {path}"
        )
    parts = path.split(".")
    reasons = []
    for number in range(len(parts), 0, -1):  # a function may hide the module of its name
        module = _imported(".".join(parts[:number]))
        if module is not None:
            reasons.append(_why_lacking(module, parts[:number], parts[number:]))
    return None if None in reasons else reasons[0]


def _why_lacking(module: ModuleType, path: Sequence[str], names: Sequence[str]) -> str | None:
    value: Any = module
    for number, name in enumerate(names):
        if not hasattr(value, name):
            is_last = number == len(names) - 1
            found = is_last and name in _declared(value)
            return None if found else f"{'.'.join([*path, *names[:number]])} has no {name}"
        value = getattr(value, name)
    return None


def _declared(owner: Any) -> set[str]:
    """Return the attributes that a class declares for its objects."""
    classes = getattr(owner, "__mro__", ())
    return {name for cls in classes for name in inspect.get_annotations(cls)}


def _imported(path: str) -> ModuleType | None:
    try:
        return import_module(path)
    except ImportError:
        return None


@functools.cache
def _source(module: str) -> str:
    """Return the text of a module of torch; nothing where there is none."""
    try:
        spec = find_spec(module)
    except ImportError:
        return ""
    return "" if spec is None or not spec.origin else Path(spec.origin).read_text(encoding="utf-8")
