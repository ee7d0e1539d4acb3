"""Describes the arguments of the call that made an entry, from its guards and the sizes of the call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchloom.inspect.wording.english import source_in_words
from torchloom.records import Guard

_SHAPE = re.compile(r"of shape \[[^\]]*\]")


def arguments_of(guards: Sequence[Guard], sizes: Mapping[str, Any]) -> dict[str, str]:
    """Return each tensor argument as dtype, shape, device and gradient, others as type or constant.

    Args:
        guards: those of the entry.
        sizes: the shapes of the call, by source.

    Example:
        >>> guard = Guard(
        ...     source="L['x']",
        ...     kind="TENSOR_MATCH",
        ...     text="",
        ...     english="argument x is a float32 tensor of shape [any, 4] without grad",
        ... )
        >>> arguments_of([guard], {"L['x']": [8, 4]})
        {'x': 'a float32 tensor of shape [8, 4] without grad'}
    """
    found: dict[str, str] = {}
    for guard in guards:
        if not guard.source.startswith("L[") or ".__" in guard.source:
            continue
        words = source_in_words(guard.source)
        name = words.removeprefix("argument ")
        if name.startswith("self") or "_modules" in guard.source or "_parameters" in guard.source:
            continue  # the module is the same for all entries
        if guard.kind == "TENSOR_MATCH":
            shape = sizes.get(guard.source)
            what = guard.english.removeprefix(f"{words} is ")
            if shape is not None:
                inner = ", ".join(str(size) for size in shape)
                what = _SHAPE.sub(f"of shape [{inner}]", what)
            found[name] = what
        elif guard.kind in ("EQUALS_MATCH", "CONSTANT_MATCH", "NONE_MATCH", "BOOL_MATCH"):
            found.setdefault(name, guard.english.removeprefix(f"{words} ").removeprefix("is "))
        elif guard.kind == "TYPE_MATCH":
            found.setdefault(name, guard.english.removeprefix(f"{words} is "))
    return found
