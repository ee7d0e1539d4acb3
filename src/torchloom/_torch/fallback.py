"""Running what cannot be compiled as it is, for one compiled function and no other.

torch has a setting for that, `suppress_errors`, which holds for all that compiles while it is set. Here the callback
of one compiled function is replaced in its closure; where there is none, errors of compiles are raised.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any


class FallsBack:
    """A callback of Dynamo's in front of a function's own, which compiles its frames.

    Frames that cannot be compiled run as they are. A whole graph raises before it has begun, see `is_own`, or
    runs as it is where there is nothing to compile.

    Args:
        callback: what torch.compile made for the function.
        code: of the function.
        is_whole_graph: whether the function was compiled as one.
        note: gets the reason of each frame that failed.
    """

    def __init__(
        self,
        callback: Callable[..., Any],
        code: CodeType,
        *,
        is_whole_graph: bool,
        note: Callable[[str], None],
    ) -> None:
        self._callback, self._code = callback, code
        self._is_whole_graph, self._note = is_whole_graph, note
        self._thread = threading.local()
        # What entries are compared with.
        self._torchdynamo_orig_backend: Any = callback._torchdynamo_orig_backend  # type: ignore[attr-defined]

    def __call__(self, frame: Any, *rest: Any) -> Any:
        """Compile a frame, as Dynamo asks."""
        from torch._dynamo import config, convert_frame

        # No other function is compiled while the setting holds.
        with convert_frame.compile_lock, _noted(self._note):
            if self._is_whole_graph:
                return self._compile_whole(frame, *rest)
            with config.patch(suppress_errors=True):
                return self._callback(frame, *rest)

    def _compile_whole(self, frame: Any, *rest: Any) -> Any:
        is_own = frame.f_code is self._code
        try:
            found = self._callback(frame, *rest)
        except Exception as error:  # compilers raise anything; it is raised again
            if is_own:
                self._thread.error = error
            raise
        if not is_own or getattr(found, "guarded_code", found) is not None:
            return found
        # torch would run it, leave it alone from then on, and raise in the end.
        self._note(getattr(found, "skip_reason", None) or "nothing in it was to compile")
        _count_as_compiled()
        return dataclasses.replace(found, apply_to_code=False)

    def is_own(self, error: Exception) -> bool:
        """Return whether an error ended the compile of the whole function: then nothing of it has run.

        It is forgotten then.
        """
        is_own = getattr(self._thread, "error", None) is error
        self._thread.error = None
        return is_own


def let_fall_back(
    compiled: Any, code: CodeType, *, is_whole_graph: bool, note: Callable[[str], None]
) -> FallsBack | None:
    """Let the frames of one compiled function run as they are where they cannot be compiled.

    Args:
        compiled: what torch.compile returned for a function.
        code: of that function.
        is_whole_graph: whether it was compiled as one.
        note: gets the reason of each frame that failed.
    """
    names = compiled.__code__.co_freevars
    if "callback" not in names:
        return None
    cell = compiled.__closure__[names.index("callback")]
    callback = cell.cell_contents
    if not hasattr(callback, "_torchdynamo_orig_backend"):
        return None
    found = FallsBack(callback, code, is_whole_graph=is_whole_graph, note=note)
    cell.cell_contents = found
    return found


def counts_whole_graphs() -> bool:
    """Return whether Dynamo counts what compiles in a call of a whole graph, and raises where nothing does."""
    from torch._C._dynamo import eval_frame

    return hasattr(eval_frame, "set_fullgraph_compiled_frame_count")


def _count_as_compiled() -> None:
    """Let a whole graph count as compiled that runs as it is."""
    from torch._C._dynamo import eval_frame

    if not counts_whole_graphs():
        return
    before = eval_frame.set_fullgraph_compiled_frame_count(1)
    if before != 0:
        eval_frame.set_fullgraph_compiled_frame_count(before)


@contextmanager
def _noted(note: Callable[[str], None]) -> Iterator[None]:
    """Tell why compiles inside the block fail, those that raise and those that do not."""
    from torch._dynamo import utils

    found = getattr(utils, "_compilation_metrics", ())
    last = found[-1] if found else None
    told: list[str] = []
    try:
        yield
    except Exception as error:  # compilers raise anything; it is raised again
        told.append(f"{type(error).__name__}: {error}")
        raise
    finally:
        for metrics in reversed(found):
            if metrics is last:
                break
            if metrics.fail_reason:
                told = [f"{(metrics.fail_type or '').rpartition('.')[2]}: {metrics.fail_reason}"]
        for reason in told:
            note(reason)
