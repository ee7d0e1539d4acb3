"""The mark that Dynamo keeps on a code object: compile it, use its entries alone, or leave it alone for good.

Nothing in Python reads that mark, so Dynamo is asked as a call would ask it: a frame of the code is handed
over with a callback of our own, and stopped before its first instruction. No instruction of the program runs,
no guard is looked at (entries are compared with a backend that nobody has), nothing is compiled and the order of
entries stays. Where it does not work, "nothing known" is the answer.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from torchloom._torch.compiling import AfterLookup
from torchloom._torch.introspect import cache_entries
from torchloom._torch.untraced import never_compile

_NO_FRAME = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Mark(NamedTuple):
    """What Dynamo does with the calls of a code object."""

    is_skipped: bool
    """Whether it runs as it is, whatever entries there are."""
    is_run_only: bool
    """Whether entries serve, and nothing is compiled any more: after a recompile limit."""
    frame_id: int | None
    """The first number of its compile ids, where calls are still handed to Dynamo."""


class _Begins(Exception):  # noqa: N818
    """The code was about to run."""


def mark_of(code: CodeType, region: int = -1) -> Mark | None:
    """Return Dynamo's mark on a code object; None where it cannot be known.

    Args:
        code: of a function that is called, not of a generator.
        region: number of `isolate_recompiles=True`, as entries are asked in it.
    """
    if code.co_flags & _NO_FRAME or not _can_stop_frames():
        return None
    return _ask(code, region)


def _can_stop_frames() -> bool:
    """Return whether a frame is stopped before it runs: not so inside of a debugger's prompt."""
    code = _canary.__code__
    never_compile(code)
    return _ask(code, -1) == Mark(is_skipped=True, is_run_only=False, frame_id=None)


def _canary() -> None:
    """Stand for a function that Dynamo leaves alone."""


def _ask(code: CodeType, region: int) -> Mark | None:
    states: list[dict[str, Any]] = []
    looked: list[bool] = []

    def handed(frame: Any, *rest: Any) -> Any:
        if frame.f_code is code:
            states.append(next((each for each in rest if isinstance(each, dict)), {}))
        # Not an error: Dynamo would go on as if this thread were inside of compiled code.
        return _as_it_is()

    handed._torchdynamo_orig_backend = object()  # type: ignore[attr-defined]
    never_compile(handed.__code__)
    lookup = _OwnLookup(looked.append)
    lookup.install()
    try:
        _begin(code, handed, region)
    except _Begins:
        if states:
            return Mark(is_skipped=False, is_run_only=False, frame_id=states[-1].get("_id"))
        return Mark(is_skipped=not looked, is_run_only=bool(looked), frame_id=None)
    except Exception:  # noqa: BLE001  Dynamo's C++ may raise anything where it works in another way
        return None
    finally:
        lookup.remove()
    return None


def _as_it_is() -> Any:
    """Return what tells Dynamo to run a frame this once, and to keep its mark."""
    from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

    strategy = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
    return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


def _begin(code: CodeType, callback: Callable[..., Any], region: int) -> None:
    """Begin a call of some code under a callback of Dynamo's, and stop it before its first instruction."""
    from torch._C._dynamo import eval_frame

    codes = {id(code), *(id(entry.code) for entry in cache_entries(code))}
    # Were it not stopped, it would find neither globals nor builtins nor a value to work on.
    cells = tuple(CellType() for _ in code.co_freevars)
    fn = FunctionType(code, {"__builtins__": {}}, closure=cells or None)
    args: list[Any] = [None] * code.co_argcount
    names = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    kwargs = dict.fromkeys(names)

    def stop(frame: FrameType, event: str, arg: Any) -> None:
        if id(frame.f_code) in codes:
            raise _Begins

    never_compile(stop.__code__)
    set_region = getattr(eval_frame, "set_eval_frame_isolate_recompiles_id", lambda number: number)
    traced, before = sys.gettrace(), set_region(region)
    prior: Any = eval_frame.set_eval_frame(callback)
    sys.settrace(stop)
    try:
        fn(*args, **kwargs)
    finally:
        sys.settrace(traced)
        eval_frame.set_eval_frame(prior)
        set_region(before)


class _OwnLookup(AfterLookup):
    """Tells of the lookups of this thread, and keeps them from other hooks: they are none of the program's."""

    def __init__(self, hook: Callable[[bool], None]) -> None:
        super().__init__(hook)
        self._thread = threading.get_ident()

    def __call__(self, is_hit: bool) -> bool:
        """Return whether the entry that was found may be used."""
        if threading.get_ident() == self._thread:
            self._hook(is_hit)
            return True
        return True if self._before is None else self._before(is_hit)
