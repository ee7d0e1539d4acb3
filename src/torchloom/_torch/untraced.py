"""Functions that Dynamo leaves as they are, and all that they call.

`torch.compiler.disable` says this with a wrapper, which each call pays for; here the function itself is marked.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch._C._dynamo import eval_frame as _c

from torchloom.bytecode import nested


def leave_alone(function: types.FunctionType, reason: str) -> None:
    """Let code that is compiled break its graph at a call of a function, and compile nothing of what it calls.

    Args:
        function: calls itself under the same code each time.
        reason: what the graph break is told to be for.
    """
    marked: object = function
    for name, value in {"disable": True, "disable_msg": reason, "disable_recursive": True}.items():
        setattr(marked, f"_torchdynamo_{name}", value)  # what a trace looks for
    never_compile(function.__code__, with_called=True)


def leave_frames_alone(*modules: types.ModuleType) -> None:
    """Let Dynamo compile no function of these modules as one of its own, nor what it calls from there.

    Behind a graph break the rest of a function runs in Python, and Dynamo takes each function that is
    called there for one to compile: a property, a hook, the body of an operator. A trace that meets one
    of them in a function that it compiles goes into it as ever.
    """
    for module in modules:
        for value in vars(module).values():
            for function in _functions_of(value, module.__name__):
                for code in nested(function.__code__):
                    never_compile(code, with_called=True)


def never_compile(code: types.CodeType, *, with_called: bool = False) -> None:
    """Let Dynamo run a code object as it is, where no trace is under way; a torch without this compiles more.

    Args:
        code: of a function.
        with_called: whether what it calls is run as it is, too.
    """
    try:
        action = _c._FrameAction
        called = action.SKIP if with_called else action.DEFAULT
        _c.set_code_exec_strategy(code, _c._FrameExecStrategy(action.SKIP, called))
    except AttributeError:
        return


def _functions_of(value: Any, module: str) -> Iterator[types.FunctionType]:
    """Yield the functions that a name of a module stands for, those of a class among them."""
    if isinstance(value, property):
        for each in (value.fget, value.fset):
            yield from _functions_of(each, module)
        return
    value = inspect.unwrap(getattr(value, "__func__", value))
    if getattr(value, "__module__", None) != module:
        return
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, type):
        for each in vars(value).values():
            yield from _functions_of(each, module)
