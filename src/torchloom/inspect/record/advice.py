"""Completes advice and sources as the user wrote them.

Only an argument that the user's own code passes can be marked dynamic. What follows a graph break, and what is called
behind one, is handed values that the compiled function made: then the advice is to compile the function that the user
calls with dynamic sizes. torch calls closure variables arguments, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torchloom._torch import introspect
from torchloom.inspect.record.compiles import Compile
from torchloom.inspect.wording.fixes import ATTRIBUTE_FIX, DYNAMIC_FIX, constant_fix
from torchloom.records import Function, Recompile

_CLOSURE_FIX = "a closure variable is a constant of the graph: pass it as an argument"


def name_sources(compile_: Compile) -> None:
    """Name closure variables, and the callable inside torch's wrapper function, in guards and reasons.

    Guards and reasons of the entry are changed in place.
    """
    code = compile_.code
    if code is None:
        return
    _name_arguments_of_forward(compile_)
    is_wrapped = compile_.wrapped is not None
    names = {"fn": "self"} if is_wrapped else {n: f"closure variable {n}" for n in code.co_freevars}
    for old, new in names.items():
        pattern = re.compile(rf"\bargument {re.escape(old)}(?!\w)")
        for guard in compile_.entry.guards:
            guard.english = pattern.sub(new, guard.english)
        for reason in compile_.entry.recompiles:
            if not pattern.match(reason.source):
                continue
            reason.source = pattern.sub(new, reason.source)
            if reason.fix in (DYNAMIC_FIX, ATTRIBUTE_FIX):
                value = reason.expected.removeprefix("== ")
                reason.fix = constant_fix(reason.source, value) if is_wrapped else _CLOSURE_FIX


def _name_arguments_of_forward(compile_: Compile) -> None:
    """Name arguments as the module's forward does: what torchloom puts in front takes `*args, **kwds`."""
    names = None if compile_.code is None else introspect.forward_arguments(compile_.code)
    if names is None:
        return

    def named(text: str) -> str:
        for i, name in enumerate(names):
            text = text.replace(f"args[{i}]", name)
        text = re.sub(r"kwds\['(\w+)'\]", r"\1", text)
        return re.sub(r"(?:argument )?\bcall\.__self__", "self", text)

    entry = compile_.entry
    own = ("args", "kwds", "call")
    entry.trigger = {named(k): v for k, v in entry.trigger.items() if k not in own}
    for guard in entry.guards:
        guard.english = named(guard.english)
    for reason in entry.recompiles:
        reason.source = named(reason.source)


_MARK = re.compile(r"torch\._dynamo\.(?:decorators\.)?mark_(?:dynamic|unbacked)\(tensor, (\d+)\)")
_CALL = re.compile(r"(.+):(\d+) in (.+)")


def advise(roots: Sequence[Function]) -> None:
    """Name the argument to mark in each advice, in place, or say what else ends all recompiles of a call."""
    groups: dict[int, list[tuple[Function, Function, Recompile]]] = {}
    for root in roots:
        called = _called_by_user(root, roots)
        for function in root.walk():
            rows = groups.setdefault(id(called), [])
            rows += [(called, function, each) for each in _about_sizes(function)]
    for rows in groups.values():
        # A mark does not outlive a graph break: it helps where all is one graph.
        is_alone = all(function is called for called, function, _ in rows)
        for called, _, each in rows:
            is_marked = is_alone and _is_argument(each)
            name = each.source.removeprefix("argument ") if is_marked else ""
            each.fix = _advice(each.fix, name, called.name)


def _about_sizes(function: Function) -> Iterator[Recompile]:
    for entry in function.entries:
        yield from (each for each in entry.recompiles if _MARK.search(each.fix))


def _is_argument(each: Recompile) -> bool:
    """Return whether the value is an argument that the source names: torch hands on others as `___stack0`."""
    return each.source.startswith("argument ") and "___" not in each.source


def _advice(fix: str, argument: str, name: str) -> str:
    """Return advice about calls of the function `name`.

    Args:
        fix: says to mark `tensor`.
        argument: the one to mark; "" where a mark does not help.
        name: of the function.
    """
    mark = _MARK.search(fix)
    if mark is None:
        return fix
    before, is_first = fix[: mark.start()], "first call" in fix
    if argument:
        call = mark[0].replace("(tensor,", f"({argument},")
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
    for call in stacks[0] if stacks else []:
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
