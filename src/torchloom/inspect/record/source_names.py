"""Names guarded values as the user wrote them: torch calls closure variables arguments, too."""

from __future__ import annotations

import re

from torchloom._torch import introspect
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
