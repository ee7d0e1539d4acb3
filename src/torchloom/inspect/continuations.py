"""What rewritten code goes on with behind a graph break: one continuation for each branch."""

from __future__ import annotations

import dis
import re
from collections.abc import Mapping
from types import CodeType
from typing import Any

from torchloom._torch import introspect
from torchloom.inspect.pseudo import pseudo_source
from torchloom.records import Continuation

RESUME = re.compile(r"(?:torch_dynamo_resume_in_)+(.*?)_at_(\d+)")
"""How Dynamo calls the code of a continuation: function and line."""
_RESUME = "__resume_at"


def continuations_of(code: CodeType, namespace: Mapping[str, Any]) -> list[Continuation]:
    """Return the continuations of rewritten code as records; see `continuations`."""
    return [continuation(name, each) for name, each in continuations(code, namespace)]


def continuation(name: str, code: CodeType) -> Continuation:
    """Return the record of a continuation.

    Args:
        name: its global name.
        code: what Dynamo made of the rest of the function.
    """
    return Continuation(
        name=name,
        function=code.co_name,
        line=line_of(code),
        source=pseudo_source(code, code.co_name),
        num_entries=len(introspect.cache_entries(code)),
    )


def continuations(code: CodeType, namespace: Mapping[str, Any]) -> tuple[tuple[str, CodeType], ...]:
    """Return what rewritten code goes on with behind a graph break, taken or not.

    Args:
        code: as Dynamo wrote it.
        namespace: the globals in which it runs.
    """
    found: dict[str, CodeType] = {}
    for name in _names_in_order(code):
        resume = introspect.continuation_code(namespace.get(name))
        if resume is not None:
            found.setdefault(name, resume)
    return tuple(found.items())


def _names_in_order(code: CodeType) -> list[str]:
    """Return the names of continuations as the bytecode reaches them."""
    names = [name for name in code.co_names if name.startswith(_RESUME)]
    if len(names) < 2:
        return names
    met = [ins.argval for ins in dis.get_instructions(without_constants(code))]
    return sorted((name for name in names if name in met), key=met.index)


def line_of(code: CodeType) -> int:
    """Return the line on which a function begins, or goes on behind a graph break."""
    match = RESUME.fullmatch(code.co_name)
    if match is None:
        return introspect.place_of(code)[1]
    # What runs first is Dynamo's: it puts values back and jumps to where the function goes on.
    bare = without_constants(code)
    at = {ins.offset: ins for ins in dis.get_instructions(bare)}
    lines = dict(dis.findlinestarts(bare))
    for ins in at.values():
        if "JUMP" in ins.opname and isinstance(ins.argval, int):
            starts = [start for start in lines if start <= ins.argval and lines[start]]
            return lines[max(starts)] if starts else int(match.group(2))
    return int(match.group(2))


def without_constants(code: CodeType) -> CodeType:
    """Return code that `dis` can read without printing the objects of the program in it."""
    return code.replace(co_consts=(None,) * len(code.co_consts))
