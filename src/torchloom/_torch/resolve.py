"""Finds which names of the table this torch lacks."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torchloom._torch.table import NAMES, PrivateName


def absent() -> Iterator[tuple[PrivateName, str]]:
    """Yield the names that this torch lacks, with why they are not found."""
    for row in NAMES:
        if reason := why_missing(row.name):
            yield row, reason


def is_expected(row: PrivateName) -> bool:
    """Return whether the table says that this torch has a name."""
    return row.holds_on(torch.__version__)


def why_missing(name: str) -> str | None:
    """Return why neither a name of the table nor another in its place is in this torch, None if one is.

    Example:
        >>> why_missing("torch._dynamo.eval_frame.OptimizedModule")
        >>> why_missing("torch._dynamo.no_such_name")
        'torch._dynamo has no no_such_name'
    """
    first, *others = name.split("|")
    owner = first[: max(first.rfind("."), first.rfind(":")) + 1]
    reasons = [_why_missing(each) for each in (first, *(owner + other for other in others))]
    return None if None in reasons else reasons[0]


@functools.cache
def _why_missing(name: str) -> str | None:
    path, _, word = name.partition(":")
    if word:
        is_there = re.search(rf"\b{word}\b", _source(path))
        return None if is_there else f"{word} is not in the source of {path}"
    parts = path.split(".")
    reasons = []
    for number in range(len(parts), 0, -1):  # a function may hide the module of its name
        try:
            value: Any = import_module(".".join(parts[:number]))
        except ImportError:
            continue
        reasons.append(_why_lacking(value, parts, number))
    return None if None in reasons else reasons[0]


def _why_lacking(value: Any, parts: list[str], first: int) -> str | None:
    """Return which of the names from the `first` on an object lacks, None if it has them all."""
    for number, name in enumerate(parts[first:], first):
        is_declared = any(name in inspect.get_annotations(c) for c in getattr(value, "__mro__", ()))
        if number == len(parts) - 1 and is_declared:  # by a class for its objects
            return None
        if not hasattr(value, name):
            return f"{'.'.join(parts[:number])} has no {name}"
        value = getattr(value, name)
    return None


@functools.cache
def _source(module: str) -> str:
    """Return the text of a module of torch; nothing where there is none."""
    try:
        spec = find_spec(module)
    except ImportError:
        return ""
    return "" if spec is None or not spec.origin else Path(spec.origin).read_text(encoding="utf-8")
