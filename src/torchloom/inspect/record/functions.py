"""Groups compiles by function: names, why calls run eagerly, and continuations behind graph breaks.

Hits are counted at graphs. Each call of an entry without a graph calls its one continuation, so it has as many calls
as the continuation.
"""

from __future__ import annotations

import inspect
import linecache
import tokenize
from collections.abc import Mapping, Sequence
from types import CodeType

from torchloom._torch import introspect
from torchloom.inspect.collected import EagerCalls
from torchloom.inspect.live.rewritten import RESUME, graph_name
from torchloom.inspect.live.target import short_name
from torchloom.inspect.record.compiles import Compile, CompileKey
from torchloom.inspect.record.recompiles import advise
from torchloom.records import Function

_Group = tuple[int, int, str]
"""(epoch, frame id, name of what torch wrapped)."""
_Groups = Mapping[_Group, Sequence[Compile]]
NOTHING_TO_COMPILE = "nothing to compile: no operator of torch was traced"
NOTHING_LATER = (
    "not compiled any more, and its entries not used: in a later call there was nothing to compile"
)


def functions_of(compiles: Mapping[CompileKey, Compile], eager: EagerCalls) -> list[Function]:
    """Return the functions that were compiled or tried, those behind graph breaks as children.

    Args:
        compiles: by key, with completed entries.
        eager: calls that ran eagerly because no entry fitted.
    """
    groups: dict[_Group, list[Compile]] = {}
    for key in sorted(compiles):
        # All partials, and all modules of torch.nn, are compiled as one function of torch's own.
        wrapped = compiles[key].wrapped
        group = (*key[:2], "" if wrapped is None else wrapped.name)
        groups.setdefault(group, []).append(compiles[key])
    functions = {key: _function(group) for key, group in groups.items()}
    for key, group in groups.items():
        _fill(functions[key], group, eager)
    links = _Links(groups)
    _count_through_continuations(functions, groups, links)
    roots = _hung(functions, groups, _parents(groups, links))
    advise(roots)
    return roots + _compiled_before(groups, eager)


def _function(group: Sequence[Compile]) -> Function:
    """Return the record of a function, without entries."""
    first = group[0]
    code = next((each.code for each in group if each.code is not None), None)
    if first.wrapped is not None:
        name, file, line = first.wrapped
        source = _source_at(file, line)
        function = Function(
            name=short_name(name), qualname=name, file=file, line=line, source=source
        )
    elif code is not None:
        function = _named_by(code)
    else:
        # A capture of a whole function, as for serving, says no name.
        name = "captured graph" if first.entry.artifacts else "unknown"
        function = Function(name=name, file="", line=0)
    function.epoch, function.frame_id = first.key[:2]
    return function


def _named_by(code: CodeType, epoch: int = 0) -> Function:
    """Return the record of a code object's function, without entries."""
    file, line = introspect.place_of(code)
    match = RESUME.fullmatch(code.co_name)
    qualname = introspect.qualname_of(code)
    return Function(
        name=code.co_name if match else short_name(qualname),
        qualname=qualname,
        file=file,
        line=int(match.group(2)) if match and file == code.co_filename else line,
        source="" if match else _source_at(file, line),  # the report shows what it continues
        epoch=epoch,
    )


def _fill(function: Function, group: Sequence[Compile], eager: EagerCalls) -> None:
    for each in group:
        entry = each.entry
        for each_break in entry.breaks:  # of some, torch tells no line of the user's
            place = f"{function.file}:{function.line} in {function.name}"
            each_break.user_stack = each_break.user_stack or [place]
        if each.is_entry:
            function.entries.append(entry)
        elif each.has_failed and not each.hit_limit:
            metrics = entry.metrics.get("forward", {})
            why = metrics.get("fail_reason") or metrics.get("fail_type") or "unknown"
            function.skipped = entry.status if entry.status != "live" else f"failed: {why}"
            function.breaks += entry.breaks
        elif not each.hit_limit and function.entries:
            function.skipped = NOTHING_LATER
        function.num_hits += entry.num_hits
        function.num_misses += 1
    if not function.entries and function.skipped is None:
        function.skipped = NOTHING_TO_COMPILE
    codes = {each.code: None for each in group if each.code is not None}
    if group[0].wrapped is not None and not any(each.hit_limit for each in group):
        codes = {}  # all such share a code: those calls were of another one
    for code in codes:
        function.num_eager_calls += eager.counts.get((function.epoch, code), 0)
        limit = eager.limited.get((function.epoch, code))
        if limit is not None:
            function.recompile_limit = limit
    if function.num_eager_calls:
        function.skipped = _over(function.recompile_limit, function.num_eager_calls)


def _over(limit: int | None, num_calls: int) -> str:
    calls = f"{num_calls} call{'s' if num_calls != 1 else ''} that no entry fits ran eagerly"
    if limit is None:
        return f"not compiled any more, as after a recompile limit or in run-only mode: {calls}"
    return f"the recompile limit of {limit} is reached: {calls}"


def _compiled_before(groups: _Groups, eager: EagerCalls) -> list[Function]:
    """Return functions that were not compiled while watched, but whose calls ran eagerly."""
    known = {(key[0], each.code) for key, group in groups.items() for each in group}
    found = []
    for (epoch, code), count in eager.counts.items():
        if (epoch, code) not in known:
            function = _named_by(code, epoch)
            function.num_eager_calls, function.skipped = count, _over(None, count)
            found.append(function)
    return found


def _hung(
    functions: Mapping[_Group, Function], groups: _Groups, parents: Mapping[_Group, _Group]
) -> list[Function]:
    """Put continuations below the function that they continue; return the other functions."""
    roots: list[Function] = []
    before: dict[tuple[int, CodeType], Function] = {}
    for key, function in functions.items():
        parent = parents.get(key) if RESUME.fullmatch(function.name) else None
        whole = next((each.continues for each in groups[key] if each.continues), None)
        if parent is not None:
            functions[parent].children.append(function)
        elif whole is None:
            roots.append(function)
        else:  # its beginning was compiled before the watch
            place = (function.epoch, whole)
            if place not in before:
                before[place] = _named_by(whole, function.epoch)
                roots.append(before[place])
            before[place].children.append(function)
    for function in [*functions.values(), *before.values()]:
        function.children.sort(key=lambda child: (child.line, child.frame_id or 0))
    return roots


def _source_at(file: str, line: int) -> str:
    try:
        return "".join(inspect.getblock(linecache.getlines(file)[line - 1 :]))
    except (OSError, ValueError, IndexError, SyntaxError, tokenize.TokenError):
        return ""


class _Links:
    """The groups by what they compiled, and by the continuations that they call."""

    def __init__(self, groups: _Groups) -> None:
        self.by_code: dict[tuple[int, int], _Group] = {}
        self.callers: dict[tuple[int, int], list[_Group]] = {}
        for key, each in ((key, each) for key, group in groups.items() for each in group):
            self.by_code[key[0], id(each.code)] = key
            for _, code in each.continuations:
                self.callers.setdefault((key[0], id(code)), []).append(key)


def _parents(groups: _Groups, links: _Links) -> dict[_Group, _Group]:
    """Return the group of the function that each continuation continues."""

    def caller(key: _Group) -> _Group | None:
        found = (each for c in groups[key] for each in links.callers.get((key[0], id(c.code)), ()))
        return next((each for each in found if each != key), None)

    parents = {}
    for key, group in groups.items():
        wholes = (
            links.by_code.get((key[0], id(each.continues))) for each in group if each.continues
        )
        parent = next((whole for whole in wholes if whole is not None), None)
        # The rest of a function that was inlined: below the outermost one that leads to it.
        above, seen = caller(key) if parent is None else None, {key}
        while above is not None and above not in seen:
            seen.add(above)
            parent, above = above, caller(above)
        if parent is not None:
            parents[key] = parent
    return parents


def _count_through_continuations(
    functions: Mapping[_Group, Function], groups: _Groups, links: _Links
) -> None:
    """Set the hits of entries without a graph, or mark them as not counted."""
    # Dynamo meets a continuation after the code that calls it: go from the innermost outwards.
    for key in sorted(groups, key=lambda key: key[:2], reverse=True):
        for each in groups[key]:
            code = each.rewritten.transformed if each.rewritten and each.is_entry else None
            if code is None or graph_name(code):
                continue
            codes = [(key[0], id(code)) for _, code in each.continuations]
            whole = links.by_code.get(codes[0]) if len(codes) == 1 else None
            is_one = whole is not None and len(links.callers[codes[0]]) == 1
            child = functions[whole] if whole and is_one else None
            if child is None or not child.entries or not all(e.is_counted for e in child.entries):
                each.entry.is_counted = False
                continue
            each.entry.num_hits = child.num_hits + child.num_eager_calls
            functions[key].num_hits += each.entry.num_hits
