"""Finds the function that each continuation belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torchloom.inspect.record.compiles import Compile

Group = TypeVar("Group", bound=tuple[int, int, str])


def parents_of(groups: Mapping[Group, Sequence[Compile]]) -> dict[Group, Group]:
    """Return the group of the function that each continuation continues.

    Args:
        groups: compiles by (epoch, frame id, name).
    """
    by_code = {(key[0], id(each.code)): key for key, group in groups.items() for each in group}
    callers = _callers(groups, by_code)
    found = {}
    for key, group in groups.items():
        wholes = (by_code.get((key[0], id(each.continues))) for each in group if each.continues)
        parent = next((whole for whole in wholes if whole is not None), None)
        # The rest of a function that was inlined: below the one whose code calls it.
        parent = _outermost(key, callers) if parent is None else parent
        if parent is not None:
            found[key] = parent
    return found


def _callers(
    groups: Mapping[Group, Sequence[Compile]], by_code: Mapping[tuple[int, int], Group]
) -> dict[Group, Group]:
    """Return, by continuation, the group whose rewritten code calls it."""
    found: dict[Group, Group] = {}
    for key, group in groups.items():
        for each in group:
            for _, code in () if each.rewritten is None else each.rewritten.continuations:
                child = by_code.get((key[0], id(code)))
                if child is not None and child != key:
                    found.setdefault(child, key)
    return found


def _outermost(key: Group, callers: Mapping[Group, Group]) -> Group | None:
    found, seen = callers.get(key), {key}
    while found is not None and found not in seen and found in callers:
        seen.add(found)
        found = callers[found]
    return found
