"""Continuations behind graph breaks: the function that each belongs to, and hits that are counted through them.

Hits are counted at graphs. Each call of an entry without a graph calls its one continuation, so it has as many calls
as the continuation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torchloom.inspect.live.rewritten import graph_name
from torchloom.inspect.record.compiles import Compile
from torchloom.records import Function

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


def count_through_continuations(
    functions: Mapping[Group, Function], groups: Mapping[Group, Sequence[Compile]]
) -> None:
    """Set the hits of entries without a graph, or mark them as not counted.

    Args:
        functions: by group, with the calls of their other entries.
        groups: the compiles of each function.
    """
    named = Counter(
        (each.key[0], id(code))
        for group in groups.values()
        for each in group
        if each.rewritten is not None
        for _, code in each.rewritten.continuations
    )
    by_code = {(key[0], id(each.code)): key for key, group in groups.items() for each in group}
    # Dynamo meets a continuation after the code that calls it: go from the innermost outwards.
    for key in sorted(groups, key=lambda key: key[:2], reverse=True):
        for each in groups[key]:
            rewritten = each.rewritten
            if not each.is_entry or rewritten is None or graph_name(rewritten.transformed):
                continue
            codes = [(key[0], id(code)) for _, code in rewritten.continuations]
            child = (
                functions.get(by_code[codes[0]])
                if len(codes) == 1 and codes[0] in by_code
                else None
            )
            if child is None or named[codes[0]] != 1 or not _is_counted(child):
                each.entry.is_counted = False
                continue
            each.entry.num_hits = child.num_hits + child.num_eager_calls
            functions[key].num_hits += each.entry.num_hits


def _is_counted(function: Function) -> bool:
    return bool(function.entries) and all(entry.is_counted for entry in function.entries)
