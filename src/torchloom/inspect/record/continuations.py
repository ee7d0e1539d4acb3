"""Continuations behind graph breaks: the function that each belongs to, and hits that are counted through them.

Hits are counted at graphs. Each call of an entry without a graph calls its one continuation, so it has as many calls
as the continuation.
"""

from __future__ import annotations

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
    by_code, callers = _by_code(groups), _callers(groups)

    def caller(key: Group) -> Group | None:
        found = (each for c in groups[key] for each in callers.get((key[0], id(c.code)), ()))
        return next((each for each in found if each != key), None)

    parents = {}
    for key, group in groups.items():
        wholes = (by_code.get((key[0], id(each.continues))) for each in group if each.continues)
        parent = next((whole for whole in wholes if whole is not None), None)
        # The rest of a function that was inlined: below the outermost one that leads to it.
        above, seen = caller(key) if parent is None else None, {key}
        while above is not None and above not in seen:
            seen.add(above)
            parent, above = above, caller(above)
        if parent is not None:
            parents[key] = parent
    return parents


def _by_code(groups: Mapping[Group, Sequence[Compile]]) -> dict[tuple[int, int], Group]:
    return {(key[0], id(each.code)): key for key, group in groups.items() for each in group}


def _callers(groups: Mapping[Group, Sequence[Compile]]) -> dict[tuple[int, int], list[Group]]:
    """Return, by the epoch and the code of a continuation, the group of each entry that calls it."""
    found: dict[tuple[int, int], list[Group]] = {}
    for key, group in groups.items():
        for each in group:
            for _, code in each.continuations:
                found.setdefault((key[0], id(code)), []).append(key)
    return found


def count_through_continuations(
    functions: Mapping[Group, Function], groups: Mapping[Group, Sequence[Compile]]
) -> None:
    """Set the hits of entries without a graph, or mark them as not counted.

    Args:
        functions: by group, with the calls of their other entries.
        groups: the compiles of each function.
    """
    by_code, callers = _by_code(groups), _callers(groups)
    # Dynamo meets a continuation after the code that calls it: go from the innermost outwards.
    for key in sorted(groups, key=lambda key: key[:2], reverse=True):
        for each in groups[key]:
            if (
                not each.is_entry
                or each.rewritten is None
                or graph_name(each.rewritten.transformed)
            ):
                continue
            codes = [(key[0], id(code)) for _, code in each.continuations]
            is_one = len(codes) == 1 and len(callers[codes[0]]) == 1 and codes[0] in by_code
            child = functions[by_code[codes[0]]] if is_one else None
            if child is None or not _is_counted(child):
                each.entry.is_counted = False
                continue
            each.entry.num_hits = child.num_hits + child.num_eager_calls
            functions[key].num_hits += each.entry.num_hits


def _is_counted(function: Function) -> bool:
    return bool(function.entries) and all(entry.is_counted for entry in function.entries)
