"""Names guarded values as the user wrote them: torch calls closure variables arguments, too."""

from __future__ import annotations

import re

from torchloom.inspect.record.compiles import Compile
from torchloom.inspect.wording.reasons.fixes import ATTRIBUTE_FIX, DYNAMIC_FIX, constant_fix

_CLOSURE_FIX = "a closure variable is a constant of the graph: pass it as an argument"


def name_sources(compile_: Compile) -> None:
    """Name closure variables, and the callable inside torch's wrapper function, in guards and reasons.

    Guards and reasons of the entry are changed in place.
    """
    code = compile_.code
    if code is None:
        return
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
