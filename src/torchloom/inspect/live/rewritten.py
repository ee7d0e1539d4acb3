"""What code that Dynamo rewrote calls: its graph, and a continuation for each branch behind a graph break."""

from __future__ import annotations

import dis
import re
from collections.abc import Mapping
from types import CodeType
from typing import Any

from torchloom._torch import introspect
from torchloom.inspect.pseudo import CONTINUATION, GRAPH, pseudo_source
from torchloom.records import Continuation

RESUME = re.compile(r"(?:torch_dynamo_resume_in_)+(.*?)_at_(\d+)")
"""How Dynamo names the code of a continuation: function and line."""


def continuations_of(code: CodeType, namespace: Mapping[str, Any]) -> list[Continuation]:
    """Return the continuations of rewritten code as records; see `continuations`."""
    return [continuation(name, each) for name, each in continuations(code, namespace)]


def continuation(name: str, code: CodeType) -> Continuation:
    """Return the record of a continuation.

    Args:
        name: its global name.
        code: what Dynamo made of the code behind the graph break.
    """
    return Continuation(
        name=name,
        function=code.co_name,
        line=line_of(code),
        source=pseudo_source(code, code.co_name),
        num_entries=len(introspect.cache_entries(code)),
    )


def continuations(code: CodeType, namespace: Mapping[str, Any]) -> tuple[tuple[str, CodeType], ...]:
    """Return the continuations of rewritten code behind its graph breaks, taken or not.

    Args:
        code: as Dynamo wrote it.
        namespace: the globals in which it runs.
    """
    held = _held(code)
    if not held and not any(name.startswith(CONTINUATION) for name in code.co_names):
        return ()
    found: dict[str, CodeType] = {}
    for ins in dis.get_instructions(without_constants(code)):  # in the order of the bytecode
        if ins.opname == "LOAD_CONST" and ins.arg in held:
            value: Any = held[ins.arg]
            names = (name for name, each in list(namespace.items()) if each is value)
            name = next(names, value.co_name)
        elif isinstance(ins.argval, str) and ins.argval.startswith(CONTINUATION):
            name, value = ins.argval, namespace.get(ins.argval)
        else:
            continue
        resume = introspect.continuation_code(value)
        if resume is not None:
            found.setdefault(name, resume)
    return tuple(found.items())


def _held(code: CodeType) -> dict[int, CodeType]:
    """Return continuations among the constants, by index: torch 2.11 keeps those with free variables there."""
    consts = enumerate(code.co_consts)
    return {
        i: each for i, each in consts if type(each) is CodeType and RESUME.fullmatch(each.co_name)
    }


def graph_name(code: CodeType) -> str | None:
    """Return the global name under which an entry's code calls its graph."""
    return next((name for name in code.co_names if name.startswith(GRAPH)), None)


def line_of(code: CodeType) -> int:
    """Return the line on which a function begins, or on which a continuation resumes."""
    match = RESUME.fullmatch(code.co_name)
    file, line = introspect.place_of(code)
    if match is None or file != code.co_filename:  # what torchloom puts in front of a module
        return line
    # The first instructions are Dynamo's: they restore values and jump to where the function resumes.
    bare = without_constants(code)
    at = {ins.offset: ins for ins in dis.get_instructions(bare)}
    lines = dict(dis.findlinestarts(bare))
    for ins in at.values():
        if "JUMP" in ins.opname and isinstance(ins.argval, int):
            starts = [start for start in lines if start <= ins.argval and lines[start]]
            return lines[max(starts)] if starts else int(match.group(2))
    return int(match.group(2))


def without_constants(code: CodeType) -> CodeType:
    """Return code without constants, so that `dis` does not print objects of the program."""
    return code.replace(co_consts=(None,) * len(code.co_consts))
