"""Completes advice about sizes: only an argument that the user's own code passes can be marked dynamic.

What follows a graph break, and what is called behind one, is handed values that the compiled function made: for
these, the advice is about the function that the user calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torchloom.records import Function, Recompile

_MARK = re.compile(r"torch\._dynamo\.(?:decorators\.)?mark_(?:dynamic|unbacked)\(tensor, (\d+)\)")
_SIZE = re.compile(r"size\((\d+)\) == (\d+)")
_CALL = re.compile(r"(.+):(\d+) in (.+)")


def advise(roots: Sequence[Function]) -> None:
    """Name the argument to mark in each advice, in place, or say what else ends the recompile."""
    for root in roots:
        called = _called_by_user(root, roots)
        for function in root.walk():
            for each in _about_sizes(function):
                marked = _cause(called, each)
                if function is called and _is_argument(each):
                    dim = _MARK.search(each.fix)
                    marked = f"{each.source.removeprefix('argument ')}, {dim[1] if dim else 0}"
                each.fix = _advice(each.fix, marked, called.name)


def _about_sizes(function: Function) -> Iterator[Recompile]:
    for entry in function.entries:
        yield from (each for each in entry.recompiles if _MARK.search(each.fix))


def _cause(called: Function, each: Recompile) -> str:
    """Return the argument and dim of the called function whose size changed alike, as `x, 0`, or nothing."""
    old = each.expected.rpartition(" ")[2]
    for other in (r for entry in called.entries for r in entry.recompiles):
        size = _SIZE.fullmatch(other.expected)
        if size and _is_argument(other) and (size[2], other.actual) == (old, each.actual):
            return f"{other.source.removeprefix('argument ')}, {size[1]}"
    return ""


def _is_argument(each: Recompile) -> bool:
    """Return whether the value is an argument that the source names: torch hands on others as `___stack0`."""
    return each.source.startswith("argument ") and "___" not in each.source


def _advice(fix: str, marked: str, name: str) -> str:
    """Return advice about calls of the function `name`.

    Args:
        fix: says to mark `tensor`.
        marked: the argument to mark and its dim, as `x, 0`; "" where no argument decides the size.
        name: of the function.
    """
    mark = _MARK.search(fix)
    if mark is None:
        return fix
    before, is_first = fix[: mark.start()], "first call" in fix
    if marked:
        call = f"{mark[0].partition('(')[0]}({marked})"
        when = f" before the first call of {name}" if is_first else f" before the call of {name}"
        return f"{before}{call}{when}{fix[mark.end() :].removeprefix(' before the first call')}"
    if is_first:
        return f"{before}compiling {name} with dynamic=True saves this compile"
    if before:  # sizes 0 and 1, which stay apart
        return before.removesuffix(", or ")
    return f"compile {name} with dynamic=True, or pad to one size"


def _called_by_user(function: Function, roots: Sequence[Function]) -> Function:
    """Return the outermost function of the record in whose call another one was compiled."""
    stacks = [entry.stack for entry in function.entries if entry.stack]
    for call in stacks[0][:-1] if stacks else []:
        found = _CALL.fullmatch(call)
        if found is None:
            continue
        file, line, name = found[1], int(found[2]), found[3]
        for other in roots:
            last = other.line + other.source.count("\n")
            own = other.name.rpartition(".")[2]
            is_it = (other.file, own) == (file, name) and other.line <= line <= last
            if is_it and other is not function:
                return other
    return function
