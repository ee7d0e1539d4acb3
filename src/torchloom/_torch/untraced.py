"""Functions that Dynamo leaves as they are, and all that they call (2.11-2.15).

`torch.compiler.disable` says this with a wrapper, which each call pays for; here the function itself is marked.
"""

from __future__ import annotations

import types

from torch._C._dynamo import eval_frame as _c


def leave_alone(function: types.FunctionType, reason: str) -> None:
    """Let code that is compiled break its graph at a call of a function, and compile nothing of what it calls.

    Args:
        function: calls itself under the same code each time.
        reason: what the graph break is told to be for.
    """
    marked: object = function
    for name, value in {"disable": True, "disable_msg": reason, "disable_recursive": True}.items():
        setattr(marked, f"_torchdynamo_{name}", value)  # what a trace looks for
    skip = _c._FrameAction.SKIP  # what the interpreter looks for, once the graph is broken
    _c.set_code_exec_strategy(function.__code__, _c._FrameExecStrategy(skip, skip))
