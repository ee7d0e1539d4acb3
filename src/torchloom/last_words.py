"""How a rank ends: told to the others, and to the user in one sentence where torchloom raised it.

An error of torchloom's says all that there is to say, so its traceback is left out, in every process; of other
errors the frames of libraries are, in a process that a launcher started, and torchrun's summary says it as well.
`TORCHLOOM_TRACEBACK=1` shows everything.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from torchloom import envs
from torchloom.errors import TorchloomError, program_error
from torchloom.files import write_whole
from torchloom.position import POSITION

_TORCH = Path(getattr(find_spec("torch"), "origin", None) or "torch").parent
"""Its folder: torch itself is not loaded for this."""
_LIBRARIES = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")),
    f"{_TORCH}/",
    f"{Path(__file__).parent}/",
    "<",  # generated code and frozen modules
)
_COMPILED = "/torchinductor_"
"""In the path of each file of Inductor's cache, unless TORCHINDUCTOR_CACHE_DIR names the folder."""
_DISTRIBUTED = f"{_TORCH}/distributed/"
_CONNECTION = "gloo/transport"
"""In the message of each error of gloo's that is about a connection: the file that raised it."""
_TELLS_TWICE = "torch._subclasses.fake_tensor"
"""A logger of torch's that prints the stack of an error that is then raised as well (2.11-2.13)."""
_HANDED_ON = "Original Traceback"
"""In the message of an error that a data loader's process raised."""
_FRAME = re.compile(r'\s*File "([^"]+)", line \d+')
_SHOWN = 6
"""Frames of the user's that an error of ours shows, the innermost first: it may be one of a model's forward."""


Explain = Callable[[str, RuntimeError], TorchloomError]
Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


@dataclass
class _Ending:
    """How this process ends, and who tells it."""

    how: str = "has ended its program"
    explain: Explain | None = None
    """Returns what all ranks together know of a broken connection."""
    before: Hook | None = None
    """What showed errors before torchloom did."""


_ENDING = _Ending()


def show_last_words() -> None:
    """Let an error of torchloom's that nobody catches be told in words; every one where a launcher is."""
    is_around = sys.excepthook.__module__.startswith(
        "torch.distributed"
    )  # prefixes lines with the rank
    if _ENDING.before is None or envs.is_launched() or is_around:
        _install()


def _install() -> None:
    _ENDING.before = _ENDING.before or sys.excepthook
    if envs.is_launched():
        logging.getLogger(_TELLS_TWICE).addFilter(_without_stack)
    sys.excepthook = _show  # again after a process group was made, whose own hook is around it then


def _without_stack(record: logging.LogRecord) -> bool:
    if not envs.is_on("TORCHLOOM_TRACEBACK"):
        record.exc_info = None
    return True


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    call = _broken_call(error, trace)
    if _ENDING.explain is not None and call and isinstance(error, RuntimeError):
        error = _ENDING.explain(call, error)
    first = program_error(_cause(error))
    said = _first_line(first)
    _ENDING.how = f"has failed with {type(first).__name__}" + (f": {said}" if said else "")
    is_told = isinstance(first, TorchloomError) or envs.is_launched() or _ENDING.explain
    is_shown = isinstance(error, KeyboardInterrupt) or not is_told
    words = "" if is_shown else last_words(error, trace)
    if words:
        _tell_torchrun(words)
    if is_shown or envs.is_on("TORCHLOOM_TRACEBACK"):
        (_ENDING.before or sys.__excepthook__)(kind, error, trace)
    else:
        print(words, file=sys.stderr, flush=True)  # noqa: T201


def _tell_torchrun(words: str) -> None:
    """Write what torchrun's summary shows of this rank, unless torch's `record` has."""
    file = envs.get_str("TORCHELASTIC_ERROR_FILE", "")
    if file and not Path(file).exists():
        facts = {"message": words, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            write_whole(file, json.dumps({"message": facts}))


def _cause(error: BaseException) -> BaseException:
    """Return what a compiler backend raised, where torch.compile has wrapped it."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else error


def tell_at_the_end(tell: Callable[[str], None], explain: Explain) -> None:
    """Call `tell` when the interpreter ends, with how it does.

    Args:
        tell: takes how this rank ends, e.g. "has ended its program".
        explain: takes a call of the program and the error of gloo's that ended it; returns what all
            ranks together know of it.
    """
    _install()
    _ENDING.explain = explain
    atexit.register(lambda: tell(f"{_ENDING.how}, in step {POSITION.step}"))


def _broken_call(error: BaseException, trace: TracebackType | None) -> str:
    """Return the call of torch.distributed that a broken connection ended; empty where none did."""
    frames = traceback.extract_tb(trace)
    if not frames or not frames[-1].filename.startswith(_DISTRIBUTED):
        return ""
    if _CONNECTION not in str(error) or isinstance(error, TorchloomError):
        return ""
    first = next(i for i, frame in enumerate(frames) if frame.filename.startswith(_DISTRIBUTED))
    name = next((f.name for f in frames[first:] if "wrapper" not in f.name), frames[-1].name)
    users = [frame for frame in frames[:first] if is_users(frame.filename)]
    caller = next(reversed(users or frames[:first]), None)
    where = "" if caller is None else f" ({caller.filename}:{caller.lineno})"
    return f"torch.distributed.{name}{where}"


def last_words(error: BaseException, trace: TracebackType | None) -> str:
    """Return what is told of an error that ends a rank.

    Args:
        error: what nobody caught.
        trace: where it came through.
    """
    dist: Any = sys.modules.get("torch.distributed")
    has_rank = (
        dist is not None
        and dist.is_initialized()
        and (envs.is_launched() or dist.get_world_size() > 1)
    )
    rank = f"[rank {dist.get_rank()}] " if has_rank else ""
    if POSITION.verdict is not None and not isinstance(error, TorchloomError):
        error = POSITION.verdict.error()  # what ended a wait in torch's own collectives
    error = _cause(error)
    frames = [frame for frame in traceback.extract_tb(trace) if is_users(frame.filename)]
    if isinstance(error, TorchloomError):
        places = [f"{f.filename}:{f.lineno} in {f.name}" for f in reversed(frames[-_SHOWN:])]
        where = f"\n  at {', called at '.join(places)}" if places else ""
        return f"{rank}{type(error).__name__}: {error}{where}"
    said = _without_libraries("".join(traceback.format_exception_only(error)))
    told = "".join(traceback.format_list(frames)) + said
    return (
        f"{rank}Traceback (most recent call last; frames of libraries are left out, "
        f"TORCHLOOM_TRACEBACK=1 shows them):\n{told.rstrip()}"
    )


def _first_line(error: BaseException) -> str:
    """Return what an error says; of one that was handed on from another process, the cause."""
    lines = str(error).strip().splitlines()
    if any(line.startswith(_HANDED_ON) for line in lines):
        return f"{lines[0]} {lines[-1]}"
    return lines[0] if lines else ""


def _without_libraries(text: str) -> str:
    """Drop frames of libraries from a message that holds the traceback of another process."""
    kept, is_shown = [], True
    for line in text.splitlines(keepends=True):
        frame = _FRAME.match(line)
        if frame is not None:
            is_shown = is_users(frame[1])
        elif not line.startswith("    "):  # neither a frame nor the code of one
            is_shown = True
        if is_shown:
            kept.append(line)
    return "".join(kept)


def is_users(filename: str) -> bool:
    """Return whether a file of a traceback is the user's: no library's, and none that a compiler wrote.

    Args:
        filename: as the traceback has it.
    """
    cache = envs.get_str("TORCHINDUCTOR_CACHE_DIR", "")
    is_compiled = _COMPILED in filename or bool(cache and filename.startswith(f"{cache}/"))
    return not (is_compiled or filename.startswith(_LIBRARIES))
