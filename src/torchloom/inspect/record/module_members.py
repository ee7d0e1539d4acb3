"""Tells whether a guarded value belongs to a module: Dynamo treats integer attributes of modules as constants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn

from torchloom.records import Guard

_CLASS = re.compile(r"<class '([^']+)'>")
_TABLE = re.compile(r"\._(?:modules|parameters|buffers)\b")


def is_in_module(source: str, guards: Sequence[Guard]) -> bool | None:
    """Return whether the source of a value leads through a module; None where that is not known.

    Args:
        source: as Dynamo writes it.
        guards: of the entry; those on types tell what the source leads through.
    """
    if _TABLE.search(source):
        return True
    types = {g.source: found.group(1) for g in guards if (found := _CLASS.search(g.text))}
    owners = [types.get(owner) for owner in _owners(source)]
    modules = _names_of_modules(nn.Module)
    if any(name in modules for name in owners):
        return True
    return None if None in owners else False


def _owners(source: str) -> Iterator[str]:
    """Yield the sources of what holds a value: of `L['a'].b[0]` those of a and b."""
    for match in re.finditer(r"\.\w+|\[[^\[\]]+\]", source):
        owner = source[: match.start()]
        if owner not in ("L", "G") and not owner.endswith(".__dict__"):
            yield owner


def _names_of_modules(base: type) -> set[str]:
    """Return the classes of modules as Python prints them, local ones as well."""
    found, waiting = set(), [base]
    while waiting:
        each = waiting.pop()
        name = f"{each.__module__}.{each.__qualname__}"
        if name not in found:
            found.add(name)
            waiting += type.__subclasses__(each)
    return found
