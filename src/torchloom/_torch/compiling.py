"""Watching Dynamo at work: hooks into compiles and lookups, and what the compile of this thread is about.

What the compile is about is read from the local variables of Dynamo's frames: where a torch names them otherwise,
the answer is "nothing known".
"""

from __future__ import annotations

import os
import sys
import timeit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType
from typing import Any

from torchloom._torch.untraced import leave_frames_alone


@contextmanager
def bytecode_hook(hook: Callable[[CodeType, CodeType], None]) -> Iterator[None]:
    """Call `hook(original, transformed)` for each compile inside the block."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    def watch(code: CodeType, new_code: CodeType) -> CodeType | None:
        hook(code, new_code)
        return None  # as it is

    handle = register_bytecode_hook(watch)
    try:
        yield
    finally:
        handle.remove()


class AfterCompile:
    """Calls a hook when a compile that began outside of any other has ended.

    `torch._dynamo.reset()` drops the hook: that it is missing tells of the reset.
    """

    def __init__(self, hook: Callable[[], None]) -> None:
        self._hook = hook

    def __call__(self, _: Any) -> None:
        """Take what Dynamo tells of the compile."""
        self._hook()

    def install(self) -> bool:
        """Register the hook; return whether it was missing."""
        from torch._dynamo.callback import callback_handler

        if self in callback_handler.end_callbacks:
            return False
        callback_handler.register_end_callback(self)
        return True

    def remove(self) -> None:
        """Drop the hook, if it is there."""
        from torch._dynamo.callback import callback_handler

        if self in callback_handler.end_callbacks:
            callback_handler.remove_end_callback(self)


class DuringCompile:
    """Keeps a block open from the start of a compile that began outside of any other to its end.

    `torch._dynamo.reset()` drops it, so install it again where it must hold.

    Args:
        block: makes what is entered and left.
    """

    def __init__(self, block: Callable[[], AbstractContextManager[None]]) -> None:
        self._block = block
        self._open: list[AbstractContextManager[None]] = []

    def install(self) -> None:
        """Register the block, unless it is there."""
        from torch._dynamo.callback import callback_handler

        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    def _start(self, _: Any) -> None:
        block = self._block()
        block.__enter__()
        self._open.append(block)

    def _end(self, _: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


class AfterLookup:
    """Calls a hook with whether an entry was found, each time that Dynamo has looked for one.

    Dynamo has room for one hook: one that was there goes on being asked.
    """

    def __init__(self, hook: Callable[[bool], None]) -> None:
        self._hook = hook
        self._before: Callable[[bool], bool] | None = None
        self._is_open = False

    def __call__(self, is_hit: bool) -> bool:
        """Return whether the entry that was found may be used: others may say no."""
        if self._is_open:
            self._hook(is_hit)
        return True if self._before is None else self._before(is_hit)

    def install(self) -> None:
        """Put the hook in front of the one that is there."""
        self._is_open, self._before = True, _set_lookup_hook(self)

    def remove(self) -> None:
        """Take the hook out; where another one stands in front, only pass on from now."""
        self._is_open = False
        before: Any = self._before
        while isinstance(before, AfterLookup) and not before._is_open:  # closed before this one
            before = before._before
        current = _set_lookup_hook(before)
        if current is not self:
            _set_lookup_hook(current)


def _set_lookup_hook(hook: Any) -> Any:
    try:
        from torch._C._dynamo.eval_frame import set_guard_complete_hook
    except ImportError:
        return None
    return set_guard_complete_hook(hook)


def compiling_code() -> CodeType | None:
    """Return the code that this thread is compiling."""
    found = _compiling().get("code")
    return found if isinstance(found, CodeType) else None


def compiling_globals() -> dict[str, Any] | None:
    """Return the globals of the function that this thread is compiling."""
    found = _compiling().get("globals")
    return found if isinstance(found, dict) else None


def limit_of_compile() -> int:
    """Return the limit that ended this thread's compile: of recompiles, or of all compiles of a function."""
    from torch._dynamo import config

    name = _compiling().get("limit_type")
    found = getattr(config, name, None) if isinstance(name, str) and name else None
    return int(config.recompile_limit if found is None else found)


def compiling_stack() -> list[tuple[str, int, str]]:
    """Return file, line and function of the frames that led to this thread's compile, outermost first.

    The stack that torch logs lacks the innermost of them.
    """
    frame = _above("_compile", "convert_frame")
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]


def compiling_wrapped() -> Any:
    """Return what is called by the function that this thread compiles, if that is one of torch's own.

    Partials, callable objects and modules of torch.nn have no code that could be compiled by itself.
    """
    from torch._dynamo.external_utils import wrap_inline

    inner = next((c for c in wrap_inline.__code__.co_consts if isinstance(c, CodeType)), None)
    found = _compiling()
    code, cells = found.get("code"), found.get("closure")
    if inner is None or not isinstance(code, CodeType) or not cells:
        return None
    place = (inner.co_filename, inner.co_firstlineno)  # there are copies of it
    if (code.co_filename, code.co_firstlineno) != place:
        return None
    return cells[0].cell_contents


def _compiling() -> dict[str, Any]:
    """Return the local variables of Dynamo's function that compiles a frame."""
    frame = _above("_compile", "convert_frame")
    return {} if frame is None else frame.f_locals


def _above(name: str, file: str) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name and file in frame.f_code.co_filename:
            return frame
        frame = frame.f_back
    return None


def traced_code() -> tuple[CodeType, ...]:
    """Return the code of the functions that this thread's compile has traced, inlined ones as well."""
    frame = _above("_compile_inner", "convert_frame") or _above("compile_inner", "convert_frame")
    names = {} if frame is None else frame.f_locals
    # torch 2.11 names the graph's output only behind the hooks that ask here.
    output = names.get("output") or getattr(names.get("tracer_output"), "output_graph", None)
    found = getattr(output, "traced_code", None)
    return tuple(each for each in found or () if isinstance(each, CodeType))


def is_in_compile(frame: FrameType | None) -> bool:
    """Return whether the thread whose innermost frame this is has entered Dynamo to compile a frame."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_CONVERT):
            return True
        frame = frame.f_back
    return False


_CONVERT = f"{os.sep}_dynamo{os.sep}convert_frame.py"
_NUM_CHECKS = 20


def guards_being_built_us() -> float | None:
    """Return how long the guards that this thread has just built take, in microseconds.

    Dynamo's own figure is of one check after it has emptied the processor's caches, several times
    what a call pays.
    """
    frame = _above("__init__", "guards.py")
    if frame is None:
        return None
    manager = getattr(frame.f_locals.get("self"), "guard_manager", None)
    scope = getattr(frame.f_locals.get("output_graph"), "local_scope", None)
    check = getattr(manager, "check", None)
    if check is None or not isinstance(scope, dict) or not check(scope):
        return None
    return (
        min(timeit.repeat(lambda: check(scope), number=_NUM_CHECKS, repeat=3)) * 1e6 / _NUM_CHECKS
    )


def continued_code(code: CodeType) -> CodeType | None:
    """Return the code of the function that a continuation behind a graph break goes on with."""
    try:
        from torch._dynamo.resume_execution import ContinueExecutionCache

        found = ContinueExecutionCache.generated_code_metadata.get(code)
    except (ImportError, AttributeError):
        return None
    return getattr(found, "code", None)


# Dynamo calls hooks while it holds a lock, and would take the same lock to compile one.
leave_frames_alone(sys.modules[__name__])
