"""How a rank ends: told to the others, and to the user in one sentence where torchloom raised it.

An error of torchloom's says all that there is to say, so its traceback is left out; of other errors the
frames of torch and torchloom are. `TORCHLOOM_TRACEBACK=1` shows everything.
"""

from __future__ import annotations

import atexit
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from torchloom import envs
from torchloom.errors import TorchloomError
from torchloom.position import POSITION
from torchloom.runtime.channel import error_of

_LIBRARIES = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(__file__).parents[2]}/",
    "<frozen",
)
_DISTRIBUTED = f"{Path(dist.__file__).parent}/"
_CONNECTION = "gloo/transport"
"""In the message of each error of gloo's that is about a connection: the file that raised it."""
_HOW = ["has ended its program"]


def tell_at_the_end(
    tell: Callable[[str], None], explain: Callable[[str, RuntimeError], TorchloomError]
) -> None:
    """Call `tell` when the interpreter ends, with how it does.

    Args:
        tell: takes how this rank ends, e.g. "has ended its program".
        explain: takes a call of the program and the error of gloo's that ended it; returns what all
            ranks together know of it.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        call = _broken_call(error, trace)
        if call and isinstance(error, RuntimeError):
            error = explain(call, error)
            kind = type(error)
        lines = str(error).strip().splitlines()
        _HOW[0] = f"has failed with {kind.__name__}" + (f": {lines[0]}" if lines else "")
        if issubclass(kind, KeyboardInterrupt) or envs.is_on("TORCHLOOM_TRACEBACK"):
            before(kind, error, trace)
        else:
            print(last_words(error, trace), file=sys.stderr, flush=True)  # noqa: T201

    sys.excepthook = hook
    atexit.register(lambda: tell(f"{_HOW[0]}, in step {POSITION.step}"))


def _broken_call(error: BaseException, trace: TracebackType | None) -> str:
    """Return the call of torch.distributed that a broken connection ended; empty where none did."""
    frames = traceback.extract_tb(trace)
    if not frames or not frames[-1].filename.startswith(_DISTRIBUTED):
        return ""
    if _CONNECTION not in str(error) or isinstance(error, TorchloomError):
        return ""
    first = next(i for i, frame in enumerate(frames) if frame.filename.startswith(_DISTRIBUTED))
    name = next((f.name for f in frames[first:] if "wrapper" not in f.name), frames[-1].name)
    caller = frames[first - 1] if first else None
    where = "" if caller is None else f" ({caller.filename}:{caller.lineno})"
    return f"torch.distributed.{name}{where}"


def last_words(error: BaseException, trace: TracebackType | None) -> str:
    """Return what is told of an error that ends a rank.

    Args:
        error: what nobody caught.
        trace: where it came through.
    """
    rank = f"[rank {dist.get_rank()}] " if dist.is_initialized() else ""
    if POSITION.verdict is not None and not isinstance(error, TorchloomError):
        error = error_of(POSITION.verdict)  # what ended a wait in torch's own collectives
    frames = [
        frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_LIBRARIES)
    ]
    if isinstance(error, TorchloomError):
        where = "".join(f"\n  at {f.filename}:{f.lineno} in {f.name}" for f in frames[-1:])
        return f"{rank}{type(error).__name__}: {error}{where}"
    told = "".join(traceback.format_list(frames) + traceback.format_exception_only(error))
    return (
        f"{rank}Traceback (most recent call last; frames of torch and torchloom are left out, "
        f"TORCHLOOM_TRACEBACK=1 shows them):\n{told.rstrip()}"
    )
